"""The ``vericache-conform`` command: one file a command."""
