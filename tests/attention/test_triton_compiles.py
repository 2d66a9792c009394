"""Triton's real compiler takes every kernel, down to the machine code of a GPU that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vericache_core.attention import triton_bits, triton_codes, triton_online, triton_paged
from vericache_core.attention.triton_online import LAUNCH, block_for, padded
from vericache_core.packing import packed_size

KINDS = {"tables": "*i64", "starts": "*i64", "limits": "*i64", "key_pages": "*i64", "value_pages": "*i64"}
done = {}

def build(label, kernel, constants, kinds=None):
    kinds = {**KINDS, **(kinds or {})}
    names = kernel.arg_names
    numbers = {"chunks", "rows", "tokens", "key_first", "value_first", "key_units", "value_units", "done", "runs", "count"}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32" if n in numbers else "*fp32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    made = triton.compile(ASTSource(kernel, signature, fixed, aligned), target=GPUTarget("cuda", 80, 32), options=LAUNCH)
    done[label] = [len(made.asm["cubin"]), made.metadata.shared]

def widths(d):
    return {"HEAD_DIM": d, "HEAD_PAD": padded(d), "VALUE_DIM": d, "VALUE_PAD": padded(d)}

for d, kv, kind, group in CASES:
    paged = {"KV": getattr(tl, kv), "KV_HEADS": 2, **widths(d), "PAGE": 128}
    group = {"GROUP": group, "GROUP_PAD": padded(group)}
    build(f"store {d} {kv}", triton_paged.store_kernel, paged, {"new_keys": kind, "new_values": kind})
    build(f"walk {d} {kv}", triton_paged.walk_kernel, {**paged, **group, "BLOCK": block_for(d), "CHUNK": triton_paged.CHUNK})
    build(f"merge {d}", triton_online.merge_kernel, {"WIDTH": d, "WIDTH_PAD": padded(d)})
    grouped, table, exact = ("*u8", kind, kind), ("*u8", "*fp16", "*fp32"), (kind, kind, kind)
    forms = {
        "kivi": ((1, 2, 16, grouped), (2, 2, 16, grouped)),
        "kivi, values exact": ((1, 4, 16, grouped), (0, 8, 1, exact)),
        "exact": ((0, 8, 1, exact), (0, 8, 1, exact)),
        "turboquant": ((3, 3, d, table), (3, 3, d, table)),
        "turboquant, uniform values": ((3, 4, d, table), (2, 4, d, grouped)),
    }
    for label, sides in forms.items():
        constants = {**widths(d), **group, "BLOCK": block_for(d) // 2, "CHUNK": triton_codes.CHUNK}
        kinds = {}
        for side, (form, bits, size, types) in zip(("KEY", "VALUE"), sides):
            constants |= {f"{side}_FORM": form, f"{side}_BITS": bits, f"{side}_GROUP": size}
            constants[f"{side}_BYTES"] = packed_size(size, bits)
            kinds |= {f"{side.lower()}_{part}": t for part, t in zip(("codes", "scale", "low"), types)}
        build(f"{label} {d}", triton_codes.walk_codes_kernel, constants, kinds)
for bits in (1, 2, 3, 4, 8):
    for kernel in (triton_bits.pack_kernel, triton_bits.unpack_kernel):
        build(f"{kernel.__name__} {bits}", kernel, {"BITS": bits, "SIZE": 1024}, {"codes": "*u8", "packed": "*u8"})
print(json.dumps(done))
"""
SHARED = 163 * 1024
"""Bytes of shared memory that a program may take on the target."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(64, "bfloat16", "*bf16", 4)], id="usual"),
        pytest.param([(80, "float16", "*fp16", 1), (128, "bfloat16", "*bf16", 8)], id="padded", marks=pytest.mark.slow),
        pytest.param([(96, "float32", "*fp32", 7), (256, "bfloat16", "*bf16", 2)], id="wide", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles(cases: list[tuple[int, str, str, int]], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = f"CASES = {cases!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout)
    assert len(sizes) >= 18
    assert all(code > 0 and shared <= SHARED for code, shared in sizes.values()), sizes
