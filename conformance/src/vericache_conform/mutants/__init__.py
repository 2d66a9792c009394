"""Deliberately broken compressors, one fault each: they test the suite.

:mod:`vericache_conform.mutants.catalogue` lists them with the checks that must catch them.
"""
