"""Does an answer parse?"""

from __future__ import annotations

import ast
import json
import re

from vericache_core.bench.prompts import Grammar

_FENCE = re.compile(r"```[\w-]*\n(.*?)(```|\Z)", re.DOTALL)


def parses(text: str, grammar: Grammar | None, whole: bool) -> bool | None:
    """Whether ``text`` holds what ``grammar`` asks for; ``None`` when nothing was asked for.

    A fenced block counts alone. Unless the answer is ``whole`` or its fence closed, the token limit cut it, so up to
    three last lines of Python may be left out; a JSON object has to be there to its end.
    """
    if grammar is None:
        return None
    fenced = _FENCE.search(text)
    body = (fenced.group(1) if fenced else text).strip()
    closed = whole or bool(fenced and fenced.group(2))
    return _is_python(body, 0 if closed else 3) if grammar == "python" else _is_json(body)


def _is_python(body: str, may_miss: int) -> bool:
    lines = body.splitlines()
    for cut in range(min(may_miss + 1, len(lines))):
        try:
            if ast.parse("\n".join(lines[: len(lines) - cut])).body:
                return True
        except (SyntaxError, ValueError):
            continue
    return False


def _is_json(body: str) -> bool:
    start = body.find("{")
    if start < 0:
        return False
    try:
        json.JSONDecoder().raw_decode(body[start:])
    except ValueError:
        return False
    return True
