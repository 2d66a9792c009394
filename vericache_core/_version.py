"""The one place that holds the version of the ``vericache`` distribution; the build reads it from here."""

__version__ = "0.1.0"
