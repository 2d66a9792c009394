"""Takes long to import."""

from __future__ import annotations

import time

from vericache_conform.mutants.healthy import Drop, spec

time.sleep(4.0)


class SlowImport(Drop):
    name = "slow-import"


SLOW_IMPORT = spec(SlowImport)
