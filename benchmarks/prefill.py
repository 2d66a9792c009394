"""Prefill in the fixed shape against one-shot prefill of transformers, in turn, on the same prompts.

Ours is a request for one token: admission, steps of the engine's shapes, everything. Theirs is one forward of the whole
prompt with a ``DynamicCache`` and SDPA, logits of the last token only. Each repetition takes a new random prompt, so that
nothing can be reused. The last column is what the project promises to keep below 1.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.model.load import load_model


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of one call."""
    started = clock()
    call()
    return clock() - started


def measure(engine: Engine, model: Any, tokens: int, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Both for prompts of ``tokens`` tokens, ``repeats`` times in turn, after one of each to warm up."""
    draw, params = torch.Generator().manual_seed(tokens), SamplingParams(max_new_tokens=1)
    times: dict[str, list[float]] = {"vericache": [], "transformers": []}
    for turn in range(repeats + 1):
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=draw)
        prompt = ids[0].tolist()

        def ours(prompt: list[int] = prompt) -> None:
            engine.generate([prompt], params, compressor=None)

        def theirs(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

        for name, call in (("vericache", ours), ("transformers", theirs)):
            seconds = timed(call, clock)
            if turn:
                times[name].append(seconds)
    ratios = [a / b for a, b in zip(times["vericache"], times["transformers"], strict=True)]
    return {"tokens": tokens, **times, "ratio": ratios}


def spread(samples: Sequence[float], form: str) -> str:
    """Median, least and most in words."""
    return f"{statistics.median(samples):{form}} ({min(samples):{form}} to {max(samples):{form}})"


@torch.inference_mode()
def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 7000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=EngineConfig().rows, help="rows of a step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # Processor time of one thread is not disturbed by what else runs, but for cache and memory bandwidth.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    engine = Engine.from_pretrained(args.model, EngineConfig(dtype=args.dtype, threads=args.threads, rows=args.rows))
    model = load_model(args.model, getattr(torch, args.dtype))[0].eval()
    model.set_attn_implementation("sdpa")
    print("| tokens | vericache, s | transformers, one forward, s | ratio |\n|---|---|---|---|")
    found = []
    for tokens in args.tokens:
        row = measure(engine, model, tokens, args.repeats, clock)
        found.append(row)
        figures = [spread(row["vericache"], ".2f"), spread(row["transformers"], ".2f"), spread(row["ratio"], ".2f")]
        print(f"| {tokens} | {' | '.join(figures)} |", flush=True)
    kind = "processor time of the one thread" if args.threads == 1 else f"wall time, {args.threads} threads"
    shapes = engine.adapter.shapes
    print(f"\nMedian (least to most) of {args.repeats}, {kind}, {args.dtype}, steps of {', '.join(map(str, shapes))} rows.")
    if args.json:
        print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
