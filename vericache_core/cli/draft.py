"""``vericache draft``: write with the compressed KV of a shared prefix while a store elsewhere verifies with the full KV."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vericache_core.cli.engine_args import add_engine_arguments, config_from_args, registry_from_args
from vericache_core.cli.output import note, print_json
from vericache_core.cli.sampling_args import add_sampling_arguments, params_from_args
from vericache_core.errors import PromptError, UsageError
from vericache_core.remote import require_grpc

if TYPE_CHECKING:
    from vericache_core.engine import RequestOutput

SCHEMA: Final = "vericache.draft/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare prompts, their shared prefix, and the engine's and sampling arguments."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what follows the shared prefix; several run side by side")
    parser.add_argument("-f", "--file", metavar="FILE", help="text that all prompts begin with")
    parser.add_argument("--check", action="store_true", help="only say hello to the store and measure the link")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; exit 1 when a request failed."""
    require_grpc()
    args.full_kv = args.full_kv or "remote"
    config = config_from_args(args)
    registry = registry_from_args(args, config)
    if config.full_kv != "remote" or config.remote is None:
        raise UsageError("drafting needs a store", hint="--remote HOST:PORT")
    if config.compressor is None and config.remote_mode not in {"remote", "fetch", "local"}:
        raise UsageError("drafting needs a compressor", hint="-c snapkv --keep 0.25")
    if config.compressor is not None:
        registry.create(config.compressor, config.compressor_options())
    params = params_from_args(args)
    if not args.prompts and not args.check:
        raise PromptError("no prompt", hint="give one, or --check")
    shared = _shared(args.file)

    from vericache_core.engine import Engine
    from vericache_core.remote.measure import measure_link

    started = time.perf_counter()
    with Engine.from_pretrained(args.model, config) as engine:
        ready = time.perf_counter() - started
        if args.check:
            speed = measure_link(engine.loop.link)  # type: ignore[attr-defined]  # full_kv is remote
            facts = {"remote": config.remote, "latency_seconds": speed.latency, "bytes_per_second": speed.bandwidth}
            if args.json:
                print_json(SCHEMA, facts)
            else:
                print(f"{config.remote}: {speed.latency * 1e3:.1f} ms, {speed.bandwidth * 8 / 1e6:.1f} Mbit/s")
            return 0
        outputs = engine.generate([f"{shared}{prompt}" for prompt in args.prompts], params)
    seconds = time.perf_counter() - started - ready
    _report(args, outputs, seconds)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise failed[0]
    return 0


def _shared(file: str | None) -> str:
    if file is None:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}", cause=str(error)) from None


def _report(args: argparse.Namespace, outputs: list[RequestOutput], seconds: float) -> None:
    if args.json:
        print_json(SCHEMA, {"seconds": seconds, "outputs": [_plain(output) for output in outputs]})
        return
    for output in outputs:
        print(output.text)
        for reason in output.metrics.degraded:
            note(reason)
    tokens = sum(len(output.token_ids) for output in outputs)
    drafted = sum(output.metrics.drafted for output in outputs)
    accepted = sum(output.metrics.accepted for output in outputs)
    print(f"{tokens} tokens in {seconds:.2f} s; {accepted} of {drafted} drafts accepted", file=sys.stderr)


def _plain(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "mode": metrics.mode,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "rounds": metrics.rounds,
        "degraded": metrics.degraded,
    }
