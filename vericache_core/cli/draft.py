"""``vericache draft``: write with the compressed KV of a shared prefix while a store elsewhere verifies with the full KV."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vericache_core.cli.engine_args import add_engine_arguments, registry_from_args, resolve_from_args, tell_what_is_idle
from vericache_core.cli.idle import IdleFlags, refuse_idle
from vericache_core.cli.metrics_args import add_metrics_argument, metrics_service, show_engine
from vericache_core.cli.output import note, print_json
from vericache_core.cli.sampling_args import SAMPLING, add_sampling_arguments, params_from_args
from vericache_core.config import EngineConfig, replace
from vericache_core.errors import PromptError, UsageError, VeriCacheError
from vericache_core.remote import require_grpc

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.outputs import Job, RequestOutput
    from vericache_core.runtime.sampling_params import SamplingParams

SCHEMA: Final = "vericache.draft/1"
_GRACE: Final = 30.0
_ALIASES: Final = {
    "token_file": "remote_token_file",
    "tls_cert": "remote_cert",
    "tls_key": "remote_key",
    "server_ca": "remote_ca",
}
"""Names that ``store serve`` has too, and the settings that they stand for on this side."""
_IDLE: Final = (IdleFlags(("file", *SAMPLING), lambda args: args.check, "--check writes nothing"),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare prompts, their shared prefix, and the engine's and sampling arguments."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="what follows the shared prefix; several run side by side. None: lines of JSON on standard input, such as "
        '{"id": 7, "prompt": "..."}, answered by lines on standard output as they are done',
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="text that all prompts begin with")
    parser.add_argument("--check", action="store_true", help="only say hello to the store and measure the link")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_metrics_argument(parser, ", until SIGTERM")
    parser.add_argument(
        "--grace", type=float, metavar="S", help=f"seconds for lines under way after SIGTERM or Ctrl-C [{_GRACE:g}]"
    )
    for flag, setting in _ALIASES.items():
        name = setting.replace("_", "-")
        parser.add_argument(f"--{flag.replace('_', '-')}", dest=flag, metavar="FILE", help=f"the same as --{name}")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; exit 1 when a request failed."""
    require_grpc()
    for flag, setting in _ALIASES.items():
        if getattr(args, flag) is not None:
            setattr(args, setting, getattr(args, flag))
    alone = bool(args.prompts or args.check)
    _check_numbers(args, alone=alone)
    args.full_kv = args.full_kv or "remote"
    resolved = resolve_from_args(args)
    config = resolved.config
    registry = registry_from_args(args, config)
    if config.full_kv != "remote" or config.remote is None:
        raise UsageError("drafting needs a store", hint="--remote HOST:PORT")
    tell_what_is_idle(resolved, fixed=True)
    params = params_from_args(args)
    shared = _shared(args.file)
    if config.compressor is None and config.remote_mode not in {"remote", "fetch", "local"}:
        config = _as_offered(config)
    if config.compressor is not None:
        registry.create(config.compressor, config.compressor_options())
    if not alone:
        return _serve(args, config, shared, params)

    from vericache_core.engine import Engine

    with Engine.from_pretrained(args.model, config) as engine:
        if args.check:
            return _check(engine, json_output=args.json)
        started = time.perf_counter()
        outputs = engine.generate([f"{shared}{prompt}" for prompt in args.prompts], params)
        seconds = time.perf_counter() - started
    _report(args, outputs, seconds)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise failed[0]
    return 0


def _check_numbers(args: argparse.Namespace, *, alone: bool) -> None:
    """UsageError for what cannot be meant, before anybody is talked to; ``alone`` is without lines of standard input."""
    from vericache_core.service.http import split_address

    if args.check and args.prompts:
        raise UsageError("--check writes nothing, and takes no PROMPT")
    refuse_idle(args, add_arguments, _IDLE)
    for flag in ("metrics", "grace"):
        if alone and getattr(args, flag) is not None:
            raise UsageError(f"--{flag} is for requests on standard input", hint="give no PROMPT and no --check")
    if args.metrics is not None:
        split_address(args.metrics)
    if args.grace is None:
        args.grace = _GRACE
    if not 0 <= args.grace < float("inf"):
        raise UsageError(f"--grace is to be 0 or more, not {args.grace:g}")


def _as_offered(config: EngineConfig) -> EngineConfig:
    """The configuration with the compressor that the store has its prefixes compressed with."""
    from vericache_core.remote.frames import Message
    from vericache_core.remote.link import Link

    link = Link.from_config(config)
    try:
        offer = link.ask("offer", Message("offer", {})).expect("offer")
    finally:
        link.close()
    if offer.fields.get("compressor") is None:
        raise UsageError("drafting needs a compressor, and the store names none", hint="-c snapkv --keep 0.25")
    return replace(config, compressor=offer.text("compressor", 256), options=offer.table("options"))


def _check(engine: Engine, *, json_output: bool) -> int:
    from vericache_core.remote.measure import measure_link

    speed = measure_link(engine.loop.store)  # type: ignore[attr-defined]  # full_kv is remote
    if json_output:
        print_json(SCHEMA, {"latency_seconds": speed.latency, "bytes_per_second": speed.bandwidth})
    else:
        print(f"{engine.config.remote}: {speed.latency * 1e3:.1f} ms, {speed.bandwidth * 8 / 1e6:.1f} Mbit/s")
    return 0


def _serve(args: argparse.Namespace, config: EngineConfig, shared: str, params: SamplingParams) -> int:
    """Answer lines of standard input until it ends; with metrics until SIGTERM, even if it has ended before."""
    from vericache_core.service.drain import draining

    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    jobs: dict[Any, Job] = {}
    with ExitStack() as stack:
        service = None if args.metrics is None else stack.enter_context(metrics_service(args.metrics))

        from vericache_core.engine import Engine

        engine = stack.enter_context(Engine.from_pretrained(args.model, config))
        if service is not None:
            show_engine(service, engine)
        drain = stack.enter_context(draining(service, timeout=args.grace))
        threading.Thread(target=_read_lines, args=(lines,), name="vericache-lines", daemon=True).start()
        ended = False
        while jobs or not (drain.begun or (ended and service is None)):
            while not drain.begun and (line := _next(lines, wait=not jobs)) != "":
                ended = ended or line is None
                if line is not None:
                    _take(line, engine, shared, params, jobs)
            if drain.expired:
                for job in jobs.values():
                    job.cancel()
            elif jobs:
                engine.step()
            _print_done(jobs)
        _give_up(lines)
    return 0


def _read_lines(lines: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        if line.strip():
            lines.put(line)
    lines.put(None)


def _next(lines: queue.SimpleQueue[str | None], *, wait: bool) -> str | None:
    """The next line, None at the end of all, or an empty one where none has come."""
    try:
        return lines.get(timeout=0.2) if wait else lines.get_nowait()
    except queue.Empty:
        return ""


def _take(line: str, engine: Engine, shared: str, params: SamplingParams, jobs: dict[Any, Job]) -> None:
    """Begin the request of a line, or say why not."""
    from vericache_core.runtime.sampling_params import SamplingParams

    number: Any = None
    try:
        asked = _asked(line)
        number = json.dumps(asked.get("id", len(jobs)))
        if number in jobs:
            raise PromptError(f"request {number} runs already")
        given = asked.get("params")
        own = params if given is None else SamplingParams.from_mapping(given)
        jobs[number] = engine.submit(f"{shared}{asked['prompt']}", own)
    except (VeriCacheError, ValueError, AttributeError) as error:
        _print_error(number and json.loads(number), error)


def _give_up(lines: queue.SimpleQueue[str | None]) -> None:
    """Answer lines that had come when the drain began, and were not begun: their senders wait for them."""
    from vericache_core.outputs import RequestOutput
    from vericache_core.runtime.metrics import RequestMetrics

    for number in range(lines.qsize()):  # more may come all the time
        line = lines.get()
        if line is not None:
            try:
                asked = _asked(line)
            except (VeriCacheError, ValueError) as error:
                _print_error(None, error)
            else:
                _print_output(asked.get("id", number), RequestOutput((), (), "", "cancelled", None, RequestMetrics()))


def _asked(line: str) -> dict[str, Any]:
    """What a line asks for; raises ValueError or PromptError where it is none."""
    asked = json.loads(line)
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise PromptError("a line is to be a JSON object with a prompt")
    return asked


def _print_error(number: Any, error: Exception) -> None:
    print(json.dumps({"schema": SCHEMA, "id": number, "error": str(error)}), flush=True)


def _print_output(number: Any, output: RequestOutput) -> None:
    print(json.dumps({"schema": SCHEMA, "id": number, **_plain(output)}, ensure_ascii=False), flush=True)


def _print_done(jobs: dict[Any, Job]) -> None:
    for number, job in list(jobs.items()):
        if job.finished:
            _print_output(json.loads(number), jobs.pop(number).result())


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
        "error": None if output.error is None else str(output.error),
        "mode": metrics.mode,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "rounds": metrics.rounds,
        "identical": metrics.identical,
        "degraded": metrics.degraded,
    }
