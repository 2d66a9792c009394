"""A drafter and a store in two network namespaces, joined by a link of limited rate: how soon it drafts, how much it gains.

Run as root: ``python benchmarks/remote.py`` (Linux with ``ip`` and ``tc``). The store prefills a shared prefix once; a
drafter then answers several requests on it, each time in a fresh process, by

- ``verify``: the compressed prefix crosses the link, drafts are verified by the store;
- ``fetch``: the full KV crosses the same link first, then the drafter decodes plainly by itself (the baseline);
- ``remote``: the store generates, the drafter only receives tokens (for comparison).

Tokens are compared with local plain decoding after a local prefill. Prints a table to stderr and one JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from netns import STORE, delaying, linked

PORT = 7431
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
COMPRESSORS = {"kivi": ["-c", "kivi", "-o", "bits=4"], "snapkv": ["-c", "snapkv", "--keep", "0.25"]}


def main() -> int:
    """Set the link up, run everything, take the link down again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of the link [%(default)s]")
    parser.add_argument("--delay", type=float, default=0.0, help="ms that a user-space proxy adds each way [%(default)s]")
    parser.add_argument("--prefix", type=int, default=6000, help="tokens of the shared prefix [%(default)s]")
    parser.add_argument("--requests", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="to generate for each request [%(default)s]")
    parser.add_argument("--window", default="8", help="tokens drafted before a verify [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="of each side [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="of each measured run, interleaved [%(default)s]")
    parser.add_argument("--compressors", default="kivi,snapkv")
    parser.add_argument("--modes", default="verify,fetch,remote")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is None and not {"verify", "fetch"} <= set(args.modes.split(",")):
        parser.error("--modes needs verify and fetch, which are compared")
    if args.work is not None:
        return work(json.loads(Path(args.work).read_text()))
    if os.geteuid() != 0:
        print("network namespaces need root", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: sys.exit(128 + got))  # by exception, so that the link is taken down
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vericache-remote-")))
        names = stack.enter_context(linked(args.rate))
        report = run_all(args, folder, *names)
    show(report)
    print(json.dumps(report))
    return 0 if all(entry["identical"] for entry in report["runs"]) else 1


# -- the orchestra -----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, folder: Path, store_side: str, drafter_side: str) -> dict[str, Any]:
    """Reference, store, and each run in a process of its own."""
    (folder / "token").write_text("benchmark-" + os.urandom(16).hex() + "\n")
    cores = sorted(os.sched_getaffinity(0))
    pins = [str(cores[0]), str(cores[-1])]
    compressors = [name for name in args.compressors.split(",") if name]
    common = {"model": args.model, "threads": args.threads, "folder": str(folder), "delay": args.delay}
    note("prompts and local plain decoding")
    reference = worker(
        folder,
        drafter_side,
        pins[1],
        {
            **common,
            "what": "reference",
            "prefix": args.prefix,
            "requests": args.requests,
            "tokens": args.tokens,
        },
    )
    runs = []
    with store(args, folder, store_side, pins[0]) as startup:
        for name in compressors:
            note(f"the store compresses the prefix with {name}")
            worker(folder, drafter_side, pins[1], {**common, "what": "warm", "arguments": COMPRESSORS[name]})
        for repeat in range(args.repeats):
            for mode in args.modes.split(","):
                for name in compressors if mode == "verify" else compressors[:1]:
                    job = {
                        **common,
                        "what": "run",
                        "arguments": [*COMPRESSORS[name], "--remote-mode", mode, "--window", args.window],
                        "tokens": args.tokens,
                    }
                    entry = worker(folder, drafter_side, pins[1], job)
                    entry |= {"mode": mode, "compressor": name if mode == "verify" else None, "repeat": repeat}
                    note(f"{mode} {name if mode == 'verify' else ''}: {entry['seconds']:.2f} s")
                    runs.append(entry)
    conditions = {
        "rate_mbit": args.rate,
        "delay_ms": args.delay,
        "cores": pins,
        "threads": args.threads,
        "model": args.model,
        "prefix_tokens": args.prefix,
        "requests": args.requests,
        "tokens": args.tokens,
        "window": args.window,
        "store_ready_seconds": startup,
        "local_prefill_seconds": reference["prefill_seconds"],
        "local_decode_seconds": reference["decode_seconds"],
        "python": sys.version.split()[0],
        "machine": os.uname().machine,
    }
    return {"schema": "vericache.benchmark.remote/1", "conditions": conditions, "runs": runs, "summary": summary(runs, args)}


@contextmanager
def store(args: argparse.Namespace, folder: Path, namespace: str, core: str) -> Iterator[float]:
    """A store in its namespace, with the prefix ready; yields the seconds that took."""
    command = [sys.executable, "-m", "vericache_core", "store", "serve", "-m", args.model, "--full-kv", "device"]
    command += ["--threads", str(args.threads), "--listen", f"{STORE}:{PORT}", "--plaintext", "--json"]
    command += ["--token-file", str(folder / "token"), "--idle", "600"]
    started = time.perf_counter()
    process = subprocess.Popen(
        inside(namespace, core, command), stdout=subprocess.PIPE, text=True, env=environment(args.threads)
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the store did not start: exit {process.wait()}")
        yield time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def worker(folder: Path, namespace: str, core: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fresh process inside the drafter's namespace; returns what it prints."""
    (folder / "job.json").write_text(json.dumps(job))
    command = inside(namespace, core, [sys.executable, str(Path(__file__).resolve()), "--work", str(folder / "job.json")])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment(job["threads"]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def inside(namespace: str, core: str, command: list[str]) -> list[str]:
    """The command in a namespace, on one core."""
    return ["ip", "netns", "exec", namespace, "taskset", "-c", core, *command]


def environment(threads: int) -> dict[str, str]:
    """This environment with libraries held to so many threads, and the checkout that this file is in, for both sides."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads), "PYTHONPATH": root}


def summary(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians, and the two figures: time to first draft over its bound, throughput over full KV first."""

    def median(mode: str, field: str, compressor: str | None = None) -> float:
        values = [run[field] for run in runs if run["mode"] == mode and compressor in (None, run["compressor"])]
        return statistics.median(values) if values else float("nan")

    new = args.requests * args.tokens
    full_seconds, full_bytes = median("fetch", "transfer_seconds"), median("fetch", "transfer_bytes")
    found: dict[str, Any] = {
        "full_kv_bytes": full_bytes,
        "full_transfer_seconds": full_seconds,
        "fetch_tokens_per_second": new / median("fetch", "seconds"),
        "remote_tokens_per_second": new / median("remote", "seconds") if any(r["mode"] == "remote" for r in runs) else None,
        "identical": all(run["identical"] for run in runs),
        "compressors": {},
    }
    for name in dict.fromkeys(run["compressor"] for run in runs if run["mode"] == "verify"):
        kept = median("verify", "transfer_bytes", name) / full_bytes
        first, seconds = median("verify", "first_draft_seconds", name), median("verify", "seconds", name)
        found["compressors"][name] = {
            "bytes_kept": kept,
            "first_draft_seconds": first,
            "first_draft_over_kept_transfer": first / (kept * full_seconds),
            "tokens_per_second": new / seconds,
            "throughput_over_full_kv_first": median("fetch", "seconds") / seconds,
            "accepted_share": median("verify", "accepted", name) / max(1.0, median("verify", "drafted", name)),
        }
    return found


def show(report: dict[str, Any]) -> None:
    """The table."""
    found, conditions = report["summary"], report["conditions"]
    note(json.dumps(conditions))
    note(f"full KV {found['full_kv_bytes'] / 1e6:.1f} MB, over the link in {found['full_transfer_seconds']:.2f} s")
    note(f"{'':10} {'kept':>6} {'first draft':>12} {'over kept x full':>17} {'tokens/s':>9} {'over fetch':>11} {'accepted':>9}")
    for name, entry in found["compressors"].items():
        note(
            f"{name:10} {entry['bytes_kept']:6.3f} {entry['first_draft_seconds']:10.2f} s "
            f"{entry['first_draft_over_kept_transfer']:17.2f} {entry['tokens_per_second']:9.2f} "
            f"{entry['throughput_over_full_kv_first']:11.2f} {entry['accepted_share']:9.2f}"
        )
    note(f"{'fetch':10} {1:6.3f} {'':12} {'':17} {found['fetch_tokens_per_second']:9.2f} {1:11.2f}")
    if found["remote_tokens_per_second"] is not None:
        note(f"{'remote':10} {'':6} {'':12} {'':17} {found['remote_tokens_per_second']:9.2f}")
    note(f"tokens identical to local plain decoding in every run: {'yes' if found['identical'] else 'NO'}")


def note(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


# -- inside the drafter's namespace ------------------------------------------------------------------


def work(job: dict[str, Any]) -> int:
    """One job; the last line on stdout is its result."""
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
        shared = engine.make_request(
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
            requests.append(engine.make_request(prompt, params, full))
            engine.loop.add(requests[-1])
        while not all(request.finished for request in requests):
            engine.loop.step()
        decoded = time.perf_counter()
        facts = {"prompts": prompts, "tokens": [list(request.generated) for request in requests]}
    (Path(job["folder"]) / "reference.json").write_text(json.dumps(facts))
    return {"prefill_seconds": prefilled - started, "decode_seconds": decoded - prefilled}


def _full(engine: Any) -> Any:
    return engine.make_full_kv(None, "device")


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
    """Answer all prompts by one path; ``warm`` asks for a single token, so that the store has compressed the prefix."""
    from vericache_core.cli.engine_args import add_engine_arguments, config_from_args
    from vericache_core.engine import Engine
    from vericache_core.runtime.sampling_params import SamplingParams

    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    address = f"{STORE}:{PORT}"
    if job["delay"]:
        address = delaying(STORE, PORT, job["delay"] / 1e3)
    arguments = ["--full-kv", "remote", "--remote", address, "--remote-plaintext", "true", "--threads", str(job["threads"])]
    arguments += ["--remote-token-file", str(Path(job["folder"]) / "token"), "--remote-timeout", "120", *job["arguments"]]
    config = config_from_args(parser.parse_args([*arguments, "--on-remote-error", "fail"]))
    facts = json.loads((Path(job["folder"]) / "reference.json").read_text())
    warm = job["what"] == "warm"
    prompts, expected = facts["prompts"], facts["tokens"]
    with Engine.from_pretrained(job["model"], config) as engine:
        params = SamplingParams(max_new_tokens=1 if warm else job["tokens"], ignore_eos=True)
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
    sys.exit(main())
