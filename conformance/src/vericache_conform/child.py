"""Entry point of a fresh process: reads one order from stdin, writes the answer to a file. See ``processes``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the order on stdin; the answer goes to the file named by the first argument."""
    order = json.load(sys.stdin)
    # Entries that the parent added at run time (a test's folder) are searched as there.
    sys.path[:] = [*order["path"], *[entry for entry in sys.path if entry not in order["path"]]]
    reply: dict[str, Any]
    try:
        module, _, function = TASKS[order["task"]].partition(":")
        reply = {"value": getattr(importlib.import_module(module), function)(order)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the boundary: the parent words it
        reply = {"error": f"{type(error).__name__}: {error}"}
    Path(sys.argv[1]).write_text(json.dumps(reply), encoding="utf-8")
    return 0


TASKS = {
    "look": "vericache_conform.look:look",
    "fingerprints": "vericache_conform.checks.contract_determinism:fingerprints_task",
}

if __name__ == "__main__":
    sys.exit(main())
