"""A drafter and a store in two network namespaces, joined by a link of limited rate: how soon it drafts, how much it gains.

Run as root: ``python benchmarks/remote.py`` (Linux with ``ip`` and ``tc``). The store prefills a shared prefix once; a
drafter then answers several requests on it, each time in a fresh process, by

- ``verify``: the compressed prefix crosses the link, drafts are verified by the store;
- ``fetch``: the full KV crosses the same link first, then the drafter decodes plainly by itself (the baseline);
- ``remote``: the store generates, the drafter only receives tokens (for comparison).

Tokens are compared with local plain decoding after a local prefill. ``--rate 100,1000 --delay-ms 0,10`` runs each pair of them,
with one store. Prints a table to stderr and a line of JSON to stdout for each pair as soon as it is done.
"""

from __future__ import annotations

import argparse
import itertools
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

from netns import STORE, Link, delayed, linked

PORT = 7431
COMPRESSORS = {"kivi": ["-c", "kivi", "-o", "bits=4"], "snapkv": ["-c", "snapkv", "--keep", "0.25"]}


def main() -> int:
    """Set the link up, run everything, take the link down again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--rate", type=numbers, default=[100.0], metavar="R,R...", help="Mbit/s of the link [100]")
    parser.add_argument(
        "--delay-ms", type=numbers, default=[0.0], metavar="D,D...", help="that a user-space proxy adds each way [0]"
    )
    parser.add_argument("--prefix", type=int, default=6000, help="tokens of the shared prefix [%(default)s]")
    parser.add_argument("--requests", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="to generate for each request [%(default)s]")
    parser.add_argument("--window", default="8", help="tokens drafted before a verify, or auto [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="of each side [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="of each measured run, interleaved [%(default)s]")
    parser.add_argument("--compressors", default="kivi,snapkv")
    parser.add_argument("--modes", default="verify,fetch,remote")
    args = parser.parse_args()
    if not {"verify", "fetch"} <= set(args.modes.split(",")):
        parser.error("--modes needs verify and fetch, which are compared")
    if os.geteuid() != 0:
        print("network namespaces need root", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: sys.exit(128 + got))  # by exception, so that the link is taken down
    identical = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vericache-remote-")))
        link = stack.enter_context(linked(max(args.rate)))
        for report in run_all(args, folder, link):
            show(report)
            print(json.dumps(report), flush=True)
            identical &= report["summary"]["identical"]
    return 0 if identical else 1


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


# -- the orchestra -----------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, folder: Path, link: Link) -> Iterator[dict[str, Any]]:
    """Reference, store, and then a report for each rate and delay, each of its runs in a process of its own."""
    (folder / "token").write_text("benchmark-" + os.urandom(16).hex() + "\n")
    cores = sorted(os.sched_getaffinity(0))
    pins = [str(cores[0]), str(cores[-1])]
    compressors = [name for name in args.compressors.split(",") if name]
    direct = f"{STORE}:{PORT}"
    common = {"model": args.model, "threads": args.threads, "folder": str(folder), "tokens": args.tokens}

    def work(what: str, **job: Any) -> dict[str, Any]:
        return worker(folder, link.drafter, pins[1], {**common, "what": what, **job})

    note("prompts and local plain decoding")
    reference = work("reference", prefix=args.prefix, requests=args.requests)
    with store(args, folder, link.store, pins[0]) as startup:
        for name in compressors:
            note(f"the store compresses the prefix with {name}")
            work("warm", address=direct, arguments=COMPRESSORS[name])
        for rate, delay in itertools.product(args.rate, args.delay_ms):
            link.limit(rate)
            note(f"{rate:g} Mbit/s, {delay:g} ms each way")
            runs = []
            with delayed(link.drafter, direct, delay) as address:
                for repeat, mode in itertools.product(range(args.repeats), args.modes.split(",")):
                    for name in compressors if mode == "verify" else compressors[:1]:
                        arguments = [*COMPRESSORS[name], "--remote-mode", mode, "--window", args.window]
                        entry = work("run", address=address, arguments=arguments)
                        entry |= {"mode": mode, "compressor": name if mode == "verify" else None, "repeat": repeat}
                        note(f"{mode} {name if mode == 'verify' else ''}: {entry['seconds']:.2f} s")
                        runs.append(entry)
            conditions = {
                "rate_mbit": rate,
                "delay_ms": delay,
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
            yield {
                "schema": "vericache.benchmark.remote/1",
                "conditions": conditions,
                "summary": summary(runs, args),
                "runs": runs,
            }


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
    program = str(Path(__file__).resolve().with_name("remote_drafter.py"))
    command = inside(namespace, core, [sys.executable, program, str(folder / "job.json")])
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
        chosen = [run for run in runs if run["mode"] == mode and compressor in (None, run["compressor"])]
        values = [run[field] for run in chosen if run[field] is not None]
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
            "verdict_seconds": median("verify", "verdict_seconds", name),
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


if __name__ == "__main__":
    sys.exit(main())
