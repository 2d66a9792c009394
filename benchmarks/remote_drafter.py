"""What ``benchmarks/remote.py`` runs in the drafter's namespace, each job in a fresh process: ``remote_drafter.py JOB.json``.

The last line on stdout is the result of the job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

TASKS = (
    "Write a Python function that returns the largest of three numbers.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that counts the words in a text.",
    "Write a Python function that tells whether a number is prime.",
    "Write a Python function that reverses a dictionary.",
    "Write a Python function that flattens nested lists.",
    "Write a Python function that computes the median of a list.",
)


def work(job: dict[str, Any]) -> int:
    """Do a job and print its result."""
    found = {"reference": reference, "warm": run, "run": run}[job["what"]](job)
    print(json.dumps(found))
    return 0


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Make the prompts; decode them plainly, with a full KV that is prefilled here."""
    from vericache_core.config import EngineConfig
    from vericache_core.engine import Engine
    from vericache_core.runtime.sampling_params import SamplingParams

    with Engine.from_pretrained(job["model"], EngineConfig(full_kv="device", threads=job["threads"])) as engine:
        prompts = make_prompts(engine.tokenizer, engine.adapter.vocab_size, job["prefix"], job["requests"])
        params = SamplingParams(max_new_tokens=job["tokens"], ignore_eos=True)
        started = time.perf_counter()
        shared = engine.builder.make_request(
            prompts[0][: job["prefix"]], SamplingParams(max_new_tokens=2, ignore_eos=True), _full(engine)
        )
        engine.loop.add(shared)
        while not shared.generated:
            engine.loop.step()
        engine.loop.release(shared)
        prefilled = time.perf_counter()
        requests = []
        for prompt in prompts:
            full = _full(engine)
            full.begin_with(shared.full.device_pages, job["prefix"])
            requests.append(engine.builder.make_request(prompt, params, full))
            engine.loop.add(requests[-1])
        while not all(request.finished for request in requests):
            engine.loop.step()
        decoded = time.perf_counter()
        facts = {"prompts": prompts, "tokens": [list(request.generated) for request in requests]}
    (Path(job["folder"]) / "reference.json").write_text(json.dumps(facts))
    return {"prefill_seconds": prefilled - started, "decode_seconds": decoded - prefilled}


def _full(engine: Any) -> Any:
    return engine.builder.make_full_kv(None, "device")


def make_prompts(tokenizer: Any, vocab: int, prefix: int, requests: int) -> list[list[int]]:
    """Prompts that share exactly ``prefix`` tokens of Python sources, each with a task of its own behind them."""
    from vericache_core.bench.prompts import build_prompts

    code = tokenizer.decode(build_prompts(tokenizer, vocab, prefix + 512, ["code"])[0].token_ids, skip_special_tokens=True)
    mark = "\x01"
    chat = [{"role": "user", "content": mark}]
    before, _, after = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).partition(mark)
    shared = tokenizer.encode(before + code, add_special_tokens=False)[:prefix]
    assert len(shared) == prefix
    texts = [TASKS[number % len(TASKS)] + f" ({number + 1})" * (number >= len(TASKS)) for number in range(requests)]
    return [shared + tokenizer.encode(f"\n\n{text}{after}", add_special_tokens=False) for text in texts]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts by one path; ``warm`` only has the prefix compressed and kernels compiled."""
    from vericache_core.cli.engine_args import add_engine_arguments, config_from_args
    from vericache_core.engine import Engine
    from vericache_core.runtime.sampling_params import SamplingParams

    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    arguments = [
        "--full-kv",
        "remote",
        "--remote",
        job["address"],
        "--remote-plaintext",
        "true",
        "--threads",
        str(job["threads"]),
    ]
    arguments += ["--remote-token-file", str(Path(job["folder"]) / "token"), "--remote-timeout", "120", *job["arguments"]]
    config = config_from_args(parser.parse_args([*arguments, "--on-remote-error", "fail"]))
    facts = json.loads((Path(job["folder"]) / "reference.json").read_text())
    warm = job["what"] == "warm"
    prompts, expected = facts["prompts"], facts["tokens"]
    with Engine.from_pretrained(job["model"], config) as engine:
        params = SamplingParams(max_new_tokens=4 if warm else job["tokens"], ignore_eos=True)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params)  # all of them, as what they share is the prefix
        seconds = time.perf_counter() - started
        errors = [str(output.error) for output in outputs if output.error is not None]
        if errors:
            raise RuntimeError(errors[0])
        stats = engine.loop.stats  # type: ignore[attr-defined]  # full_kv is remote
        transfers = list(stats.transfers.values())
        return {
            "seconds": seconds,
            "first_draft_seconds": min(stats.first_draft_seconds, default=None),
            "transfer_bytes": transfers[0][0] if transfers else 0,
            "transfer_seconds": transfers[0][1] if transfers else 0.0,
            "verdict_seconds": statistics.median(stats.verdict_seconds) if stats.verdict_seconds else None,
            "drafted": sum(output.metrics.drafted for output in outputs),
            "accepted": sum(output.metrics.accepted for output in outputs),
            "rounds": sum(output.metrics.rounds for output in outputs),
            "degraded": [reason for output in outputs for reason in output.metrics.degraded],
            "identical": warm or [list(output.token_ids) for output in outputs] == expected,
        }


if __name__ == "__main__":
    sys.exit(work(json.loads(Path(sys.argv[1]).read_text())))
