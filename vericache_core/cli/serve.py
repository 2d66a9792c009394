"""``vericache serve``: one engine behind the OpenAI API, for whatever speaks it."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vericache_core.cli.access_args import add_access_arguments, check_pair, check_tls
from vericache_core.cli.engine_args import add_engine_arguments, registry_from_args, resolve_from_args, tell_what_is_idle
from vericache_core.cli.metrics_args import add_metrics_argument, metrics_service, show_engine
from vericache_core.cli.output import note
from vericache_core.cli.sampling_args import add_sampling_arguments, params_from_args
from vericache_core.errors import ConfigError, UsageError, VeriCacheError
from vericache_core.serve import require_http

if TYPE_CHECKING:
    from vericache_core.runtime.sampling_params import SamplingParams
    from vericache_core.serve.app import Server
    from vericache_core.serve.runner import Runner
    from vericache_core.service.drain import Drain

SCHEMA: Final = "vericache.serve/1"
_LINGER: Final = 5
"""Seconds that an answer may still take to be sent when everything is decoded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to listen, who may come, and the engine's and sampling arguments."""
    parser.add_argument(
        "--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="[%(default)s]; port 0 takes a free one"
    )
    parser.add_argument("--model-name", metavar="NAME", help="what calls name the model [the last part of --model]")
    access = parser.add_argument_group("access", "beyond this machine a token file and TLS are needed")
    add_access_arguments(access, "let everybody in beyond this machine")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds for answers under way at the end [30]")
    add_metrics_argument(parser)
    parser.add_argument("--json", action="store_true", help="say in JSON, on a line of its own, when calls can come")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; exit 0 after an orderly end."""
    require_http()
    _check_numbers(args)
    tokens = _check_access(args)
    resolved = resolve_from_args(args)
    config = resolved.config
    registry = registry_from_args(args, config)
    if config.compressor is not None:
        registry.create(config.compressor, config.compressor_options())
    params = _defaults(args)
    tell_what_is_idle(resolved, fixed=True)

    from vericache_core.service.http import check_free

    check_free(args.listen)
    with ExitStack() as stack:
        service = None if args.metrics is None else stack.enter_context(metrics_service(args.metrics))

        from vericache_core.engine import Engine
        from vericache_core.serve.app import Server
        from vericache_core.serve.runner import Runner
        from vericache_core.service.drain import draining

        engine = stack.enter_context(Engine.from_pretrained(args.model, config))
        if engine.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer", hint="serve a folder that has one")
        name, stopping = args.model_name or Path(args.model).name, threading.Event()
        with draining(service, stopping.set, args.grace) as drain:
            runner = Runner(engine, drain.begin)
            server = Server(runner, name, params, config.compressor, tokens, stopping, engine)
            if service is not None:
                show_engine(service, engine)
            _serve(args, name, runner, server, drain)
    if runner.failed:
        raise VeriCacheError("the engine has died", hint="the log has the traceback; this is a bug")
    return 0


def _serve(args: argparse.Namespace, name: str, runner: Runner, server: Server, drain: Drain) -> None:
    """Answer calls on threads until a drain begins, and what is in flight then."""
    import uvicorn

    with _listen(args.listen) as listening:
        http = uvicorn.Server(
            uvicorn.Config(
                server.app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                ssl_certfile=args.tls_cert,
                ssl_keyfile=args.tls_key,
                timeout_graceful_shutdown=_LINGER,
                server_header=False,
            )
        )
        runner.start()

        def answer() -> None:
            try:
                http.run([listening])  # on a thread of its own it leaves signals alone: the drain has them
            finally:
                drain.begin()

        answering = threading.Thread(target=answer, name="vericache-http")
        answering.start()
        host, port = args.listen.rpartition(":")[0], listening.getsockname()[1]
        url = f"http{'s' if args.tls_cert else ''}://{host}:{port}/v1"
        if args.json:
            print(json.dumps({"schema": SCHEMA, "url": url, "model": name}), flush=True)
        note(f"serving {name} at {url}")
        try:
            drain.wait()
            drain.finish(lambda: runner.in_flight)
        finally:
            runner.close()
            http.should_exit = True
            answering.join()


def _listen(address: str) -> socket.socket:
    from vericache_core.service.http import split_address

    host, port = split_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:  # somebody came first while the model was loaded
        raise ConfigError(f"cannot listen on {address}", cause=str(error), hint="another port, or 0 for any") from error


def _defaults(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters of calls that leave them out."""
    for flag, hint in {
        "seed": "a call that samples draws its own",
        "logprobs": "a call asks for its own",
    }.items():
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag} has no effect", cause=hint, hint="leave it out")
    return params_from_args(args)


def _check_access(args: argparse.Namespace) -> dict[str, bytes] | None:
    """Tokens of tenants; UsageError where anybody could come in, or listen in, and nobody said that this is meant."""
    from vericache_core.service.access import is_loopback, read_pair, read_tokens

    near = is_loopback(args.listen)
    check_pair(args)
    if args.insecure and args.token_file is not None:
        raise UsageError("--insecure and --token-file exclude each other")
    if args.plaintext and args.tls_cert is not None:
        raise UsageError("--plaintext and --tls-cert exclude each other")
    if not near and args.token_file is None and not args.insecure:
        raise UsageError(f"anybody could call {args.listen}", hint="--token-file FILE; --insecure if that is meant")
    check_tls(args, near, "a proxy")
    if args.tls_cert is not None:
        read_pair(args.tls_cert, args.tls_key)
    return None if args.token_file is None else read_tokens(args.token_file)


def _check_numbers(args: argparse.Namespace) -> None:
    from vericache_core.service.http import split_address

    addresses: list[Any] = [args.listen, args.metrics]
    for address in filter(None, addresses):
        split_address(address)
    if not 0 <= args.grace < float("inf"):
        raise UsageError(f"--grace is to be 0 or more, not {args.grace:g}")
