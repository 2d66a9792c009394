"""Proves and measures the CUDA path: kernels beside their references, engines beside plain decoding, bytes per second.

``python benchmarks/gpu.py`` on a machine with a CUDA device runs three parts and stops at the first that fails:

1. kernels: every Triton kernel against its torch reference, and rows of the fixed-block attention bit for bit in
   other company;
2. identity: engines over random-weight models with the row-invariance probe on, drafting with every installed
   compressor on the device, host and disk tiers, against plain decoding of the same engine: tokens, logits;
3. speed: one decode step over a long context against torch's SDPA on the full bfloat16 KV; the bytes are those
   that the kernel has to read (codes, scales, exact rows).

``--checks`` leaves out the third part. With ``TRITON_INTERPRET=1`` and ``--device cpu`` the checks run without a GPU.
Exit status: 1 if something differs, 2 without a CUDA device. ``--json`` prints one JSON document on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from gpu_engines import check_engines
from gpu_graphs import GraphRow, check_graphs, graph_speed, graph_table
from gpu_kernels import check_kernels
from gpu_parts import DifferenceError, Shape, note
from gpu_speed import Row, speed, table


def main() -> int:
    """Run the three parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu under TRITON_INTERPRET=1")
    parser.add_argument("--checks", action="store_true", help="leave out the measurements")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and (device.type != "cuda" or not torch.cuda.is_available()):
        note("no CUDA device: nothing was checked or measured (TRITON_INTERPRET=1 with --device cpu runs the checks)")
        return 2
    mine = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim)
    shapes = [mine, *(Shape(group * 2, 2, width) for group, width in ((1, 64), (7, 80), (4, 96), (2, 256)))]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"}
    report["torch"] = torch.__version__
    try:
        report["kernel_comparisons"] = check_kernels(device, shapes[1:3] if interpreted else shapes)
        note(f"{report['kernel_comparisons']} kernel comparisons agree")
        report["engines"] = check_engines(device, interpreted)
        note(f"{len(report['engines'])} engines decode as without a compressor")
        report["graphs"] = [] if interpreted else check_graphs(device)
        rows: list[Row] = []
        steps: list[GraphRow] = []
        if not (arguments.checks or interpreted):
            for context in arguments.context:
                for batch in arguments.batch:
                    rows += speed(device, mine, context, batch, arguments.repeats)
            steps = graph_speed(device, mine, (8, 32, 128), arguments.repeats)
    except DifferenceError as difference:
        note(f"differs: {difference}")
        return 1
    report["speed"], report["graph_speed"] = [asdict(row) for row in rows], [asdict(row) for row in steps]
    if arguments.json:
        print(json.dumps(report, indent=2))
    elif rows:
        print(table(rows), graph_table(steps), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
