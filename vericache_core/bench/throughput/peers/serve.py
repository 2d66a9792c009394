"""Runs in a peer's environment: ``python serve.py MODULE`` answers requests, one JSON object a line each way.

``{"op": "load", ...}`` once, ``{"op": "run", "prompts": [[ids]], "new_tokens": n}`` as often as wanted; the end of
standard input ends the program. An answer is ``{"ok": true, ...}`` or ``{"ok": false, "error": "..."}``. MODULE, in this
folder, has a class ``Peer`` with ``__init__(**load)``, a dict ``about`` and ``run(prompts, new_tokens) -> dict``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main(module: str) -> None:
    """Serve until standard input ends."""
    # A group to be ended with all children; no session, because Linux gives each its own share of a machine that is busy.
    os.setpgrp()
    # Libraries print; the protocol keeps the real standard output to itself and they get standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            operation = request.pop("op")
            if operation == "load":
                peer = importlib.import_module(module).Peer(**request)
                answer = {"ok": True, "about": peer.about}
            else:
                answer = {"ok": True, **peer.run(**request)}
        except Exception as error:  # noqa: BLE001  (whatever a peer raises is a row of the table)
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
