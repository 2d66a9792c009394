"""The checks, a file per promise; :mod:`vericache_conform.catalogue` gathers them."""
