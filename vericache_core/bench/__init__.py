"""Measurements of compressors on a model."""
