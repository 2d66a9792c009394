"""``python -m vericache_core`` is the ``vericache`` command."""

import sys

from vericache_core.cli.main import main

sys.exit(main())
