"""Attention over paged and compressed KV: torch references and fast kernels side by side."""
