"""``python -m vericache_compressor_kvpress``: the names and what is not offered, as the README has them."""

from __future__ import annotations

import sys

from vericache_compressor_kvpress.table import NOT_OFFERED, PREFIX, PRESSES


def listing() -> str:
    """Both tables in Markdown."""
    lines = [
        "| name | press | keeps | wraps | decides the count |",
        "|---|---|---|---|---|",
    ]
    for name, press in PRESSES.items():
        wraps = ", ".join(f"`{part}`" for part in press.inner.split("+") if part)
        decides = "VeriCache" if press.route == "rank" else "the press"
        lines.append(f"| `{PREFIX}{name}` | `{press.class_name}` | {press.summary} | {wraps} | {decides} |")
    lines += ["", "Not offered:", "", "| press | why | in detail |", "|---|---|---|"]
    lines += [f"| `{name}` | {why} | {detail} |" for name, (why, detail) in NOT_OFFERED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(listing())
