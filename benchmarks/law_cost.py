"""What the law costs: plain decoding in the fixed shape against decoding with as many rows as there are requests.

For 1 and 8 requests at a given context, steps of 32 rows (the law: short ones padded) and steps of exactly
1 or 8 rows alternate in one process on the same caches, with the same attention kernel; the ratio of their
medians is the cost. ``transformers`` decoding with its own dynamic cache and SDPA stands beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.load import load_model
from vericache_core.model.probe import Sequence1, run_blocks
from vericache_core.runtime.backend import choose_attention


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def spread(samples: list[float]) -> str:
    """Median and range in words."""
    return f"{statistics.median(samples):.1f} ms ({min(samples):.1f} to {max(samples):.1f})"


@torch.inference_mode()
def measure(model: Any, requests: int, context: int, rows: int, repeats: int) -> dict[str, Any]:
    """Interleaved steps for ``requests`` requests of ``context`` tokens each."""
    fixed, natural = ModelAdapter(model, rows), ModelAdapter(model, requests)
    name, attend = choose_attention("auto", fixed.device)
    draw = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(requests):
        sequence, ids = Sequence1(fixed), torch.randint(0, fixed.vocab_size, (context,), generator=draw).tolist()
        for start in range(0, context, rows):
            block = ids[start : start + rows]
            run_blocks(fixed, attend, [(sequence, block)])
            sequence.advance(len(block))
        sequences.append(sequence)
    parts = [(sequence, [7]) for sequence in sequences]
    cache = model(torch.randint(0, fixed.vocab_size, (requests, context), generator=draw), use_cache=True, logits_to_keep=1)
    theirs = cache.past_key_values
    samples: dict[str, list[float]] = {"fixed": [], "natural": [], "transformers": []}
    one = torch.full((requests, 1), 7)
    for turn in range(repeats + 2):
        ours = timed(lambda: run_blocks(fixed, attend, parts))
        plain = timed(lambda: run_blocks(natural, attend, parts))
        hf = timed(lambda: model(one, past_key_values=theirs, use_cache=True))
        if turn >= 2:
            samples["fixed"].append(ours)
            samples["natural"].append(plain)
            samples["transformers"].append(hf)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    print(
        f"{requests} request(s) at {context} tokens, {name} attention: fixed shape of {rows} rows {spread(samples['fixed'])}, "
        f"{requests} row(s) {spread(samples['natural'])}: ratio {medians['fixed'] / medians['natural']:.2f}; "
        f"transformers {spread(samples['transformers'])}: ratio {medians['fixed'] / medians['transformers']:.2f}"
    )
    return {"requests": requests, "context": context, "rows": rows, "attention": name, "samples_ms": samples}


def main() -> None:
    """Measure 1 and 8 requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, _ = load_model(args.model, torch.bfloat16)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bf16, {torch.backends.cpu.get_cpu_capability()}")
    results = [measure(model, requests, args.context, args.rows, args.repeats) for requests in (1, 8)]
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
