"""``vericache store serve``: hold the full KV of shared prefixes and verify what drafters on other machines propose."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vericache_core.cli.access_args import add_access_arguments, check_pair, check_tls
from vericache_core.cli.engine_args import (
    add_engine_arguments,
    given_settings,
    registry_from_args,
    resolve_from_args,
    tell_idle,
)
from vericache_core.cli.idle import IdleFlags, refuse_idle
from vericache_core.cli.metrics_args import add_metrics_argument, metrics_service, show_engine
from vericache_core.cli.output import note
from vericache_core.errors import ConfigError, PromptError, RemoteError, UsageError
from vericache_core.remote import require_grpc
from vericache_core.remote.limits import Limits
from vericache_core.remote.settings import idle_in_a_store, of_a_store

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.remote.server import StoreServer
    from vericache_core.service.http import Service

SCHEMA: Final = "vericache.store.serve/1"
_GIB: Final = 1 << 30
_LOOK: Final = 0.5
"""Seconds between two looks whether the verifier lives."""
_IDLE: Final = (
    IdleFlags(("insecure",), lambda args: args.token_file, "with --token-file callers say who they are"),
    IdleFlags(("insecure",), lambda args: args.client_ca, "with --client-ca callers say who they are"),
    IdleFlags(("plaintext",), lambda args: args.tls_cert, "with --tls-cert the link has TLS"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``serve``: where to listen, who may come, what is taken on, and the engine's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="{serve}", required=True)
    _add_serve_arguments(actions.add_parser("serve", help="serve drafters until SIGTERM"))


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--listen", default="127.0.0.1:7431", metavar="HOST:PORT", help="[%(default)s]; port 0 takes a free one")
    access = serve.add_argument_group("access", "a token file or a client CA is needed, except with --insecure")
    add_access_arguments(access, "let everybody in; only on a loopback address", " of the store")
    access.add_argument("--client-ca", metavar="FILE", help="PEM file; clients must show a certificate that it vouches for")
    bounds = serve.add_argument_group("limits")
    bounds.add_argument("--max-sessions", type=int, default=Limits.sessions, metavar="N", help="[%(default)s]")
    bounds.add_argument("--tenant-sessions", type=int, default=Limits.tenant_sessions, metavar="N", help="[%(default)s]")
    bounds.add_argument("--max-tokens", type=int, default=Limits.tokens, metavar="N", help="prompt with answer [%(default)s]")
    bounds.add_argument("--prefix-gib", type=float, default=Limits.prefix_bytes / _GIB, metavar="X", help="[%(default)g]")
    bounds.add_argument("--session-gib", type=float, default=Limits.session_bytes / _GIB, metavar="X", help="[%(default)g]")
    bounds.add_argument("--idle", type=float, default=Limits.idle, metavar="S", help="seconds of silence [%(default)g]")
    serve.add_argument(
        "--prefix",
        action="append",
        metavar="FILE",
        help="have this prefix ready before anybody asks, for every tenant, compressed with -c: a JSON list of token ids, "
        "or text (repeatable)",
    )
    serve.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds for calls under way at the end [10]")
    add_metrics_argument(serve)
    serve.add_argument("--json", action="store_true", help="say in JSON, on a line of its own, when the store is ready")
    add_engine_arguments(serve)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; exit 0 after an orderly end."""
    require_grpc()
    tokens = _check_access(args)
    _check_numbers(args)
    if args.full_kv == "remote" or args.remote is not None:
        raise _no_store_of_its_own()
    resolved = resolve_from_args(args)
    if resolved.config.full_kv == "remote":
        raise _no_store_of_its_own()
    tell_idle(resolved, idle_in_a_store(resolved.config, given_settings(resolved)))
    config = of_a_store(resolved.config)
    registry = registry_from_args(args, config)
    if config.compressor is not None:
        registry.create(config.compressor, config.compressor_options())
    prefixes = [(name, _read_prefix(name)) for name in args.prefix or []]
    limits = Limits(
        sessions=args.max_sessions,
        tenant_sessions=args.tenant_sessions,
        tokens=args.max_tokens,
        prefix_bytes=int(args.prefix_gib * _GIB),
        session_bytes=int(args.session_gib * _GIB),
        idle=args.idle,
    )

    from vericache_core.remote.auth import Guard, server_credentials
    from vericache_core.service.http import check_free

    credentials = None if args.tls_cert is None else server_credentials(args.tls_cert, args.tls_key, args.client_ca)
    check_free(args.listen)
    with ExitStack() as stack:
        service = None if args.metrics is None else stack.enter_context(metrics_service(args.metrics))

        from vericache_core.engine import Engine
        from vericache_core.remote.server import StoreServer

        engine = stack.enter_context(Engine.from_pretrained(args.model, config))  # also if nothing comes to serve it
        server = StoreServer(engine, args.listen, Guard(tokens), credentials, limits)
        stack.callback(server.stop, args.grace)  # after Ctrl-C while prefixes are made, too
        for name, prompt in prefixes:
            for tenant in tokens or ("local",):
                _warm(server, engine, name, prompt, tenant)
        _serve(args, server, service)
    return 0


def _serve(args: argparse.Namespace, server: StoreServer, service: Service | None) -> None:
    from vericache_core.service.drain import draining

    with draining(service, timeout=args.grace) as drain:
        server.start()
        host = args.listen.rpartition(":")[0]
        if service is not None:
            service.watch(lambda: server.verifier.failed)
            show_engine(service, server.verifier.engine)
        if args.json:
            print(json.dumps({"schema": SCHEMA, "listen": f"{host}:{server.port}", "facts": server.facts}), flush=True)
        note(f"serving {args.model} on {host}:{server.port}")
        while not (drain.wait(_LOOK) or server.verifier.failed):
            pass
        server.stop(args.grace)  # in here, where a second signal ends the process at once
        if server.verifier.failed:
            raise RemoteError(
                "the verifier of the store has ended by a fault of its own",
                cause="the log has its traceback",
                hint="start the store again; drafters go on without it",
            )


def _no_store_of_its_own() -> ConfigError:
    return ConfigError(
        "a store holds the full KV itself, so it cannot leave it to another store",
        cause="full_kv=remote and remote= are for the side that drafts, `vericache draft`",
        hint="--full-kv device, host or disk",
    )


def _check_access(args: argparse.Namespace) -> dict[str, bytes] | None:
    """Tokens of tenants; UsageError where anybody could come in, or anybody could listen."""
    from vericache_core.service.access import is_loopback, read_tokens

    near = is_loopback(args.listen)
    refuse_idle(args, _add_serve_arguments, _IDLE)
    check_pair(args)
    if args.client_ca is not None and args.tls_cert is None:
        raise UsageError("--client-ca needs --tls-cert and --tls-key")
    if args.insecure and not near:
        raise UsageError(f"--insecure on {args.listen}", cause="others can reach it", hint="listen on 127.0.0.1")
    if args.token_file is None and args.client_ca is None and not args.insecure:
        raise UsageError("nobody would have to say who they are", hint="--token-file or --client-ca")
    check_tls(args, near, "a tunnel")
    return None if args.token_file is None else read_tokens(args.token_file)


def _check_numbers(args: argparse.Namespace) -> None:
    """UsageError for addresses and limits that cannot be meant, before a model is loaded."""
    from vericache_core.service.http import split_address

    for address in (args.listen, args.metrics):
        if address is not None:
            split_address(address)
    for name in ("max_sessions", "tenant_sessions", "max_tokens", "idle"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} is to be above 0, not {getattr(args, name):g}")
    for name in ("prefix_gib", "session_gib", "grace"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is to be 0 or more, not {getattr(args, name):g}")


def _read_prefix(name: str) -> Any:
    """What a prefix file holds: anything that is written as JSON, else text."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read prefix {name}", cause=str(error)) from None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _warm(server: StoreServer, engine: Engine, name: str, prompt: Any, tenant: str) -> None:
    """Prefill and compress a prefix before the first client comes."""
    from vericache_core.model.prompts import encode_prompt
    from vericache_core.remote.prepare import Ask
    from vericache_core.runtime.sampling_params import SamplingParams

    ids, _ = encode_prompt(prompt, engine.tokenizer, engine.adapter.vocab_size)
    options = engine.config.compressor_options()
    ask = Ask(tenant, tuple(ids), len(ids), engine.config.compressor, options, SamplingParams())
    prefix = server.verifier.prepare(ask).result()
    sent = sum(len(blob.data) for blob in prefix.blobs)
    note(f"prefix {name}: {prefix.tokens} tokens, {prefix.nbytes - sent} bytes of full KV, {sent} compressed")
    server.verifier.release(prefix).result()
