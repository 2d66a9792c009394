"""Shared prefixes over a slow link: compressed KV crosses it, the full KV stays and verifies."""
