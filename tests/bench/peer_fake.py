"""A peer for the tests: what it does is said by the environment variable FAKE_PEER."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any


class Peer:
    def __init__(self, model: str, max_len: int, requests: int, kv_bytes: int, **load: Any) -> None:
        if os.environ.get("FAKE_PEER") == "no-load":
            raise ValueError("no such\nmodel")
        self.about = {"model": model, "max_len": max_len, "requests": requests, "kv_bytes": kv_bytes} | load

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        mode = os.environ.get("FAKE_PEER", "")
        sys.stdout.write("a library talks\n")
        if mode == "raise":
            raise RuntimeError("out of luck")
        if mode == "crash":
            sys.stderr.write("fatal: it broke\n")
            sys.stderr.flush()
            os._exit(3)
        if mode == "silent":
            time.sleep(60)
        tokens = [[len(ids)] * new_tokens for ids in prompts]
        if mode == "short":
            tokens = tokens[:-1]
        return {
            "tokens": tokens,
            "decoded": new_tokens * len(prompts),
            "decode_seconds": 0.5,
            "prefill_seconds": 1.5,
            "steps": new_tokens,
            "notes": ["fake"],
        }
