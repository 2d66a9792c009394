"""``vericache bench throughput``: our engine and others side by side, tokens per second and whether they are the same."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vericache_core._version import __version__
from vericache_core.bench.throughput.lines import read_lines
from vericache_core.bench.throughput.lineup import SYSTEMS, own_systems
from vericache_core.bench.throughput.peer import KINDS, PeerSystem, parse_peer
from vericache_core.bench.throughput.rows import PLAIN
from vericache_core.bench.throughput.workloads import DEFAULT, GROUPS, SHAPES, names_of
from vericache_core.cli.bench_throughput_report import Report
from vericache_core.cli.engine_args import setting_from_text, settings_from_text
from vericache_core.cli.idle import IdleFlags, refuse_idle
from vericache_core.cli.output import note
from vericache_core.config import ENV_PREFIX, EngineConfig, replace, resolve_config
from vericache_core.errors import UsageError
from vericache_core.plugins.fields import did_you_mean
from vericache_core.plugins.registry import Registry, set_default_registry

if TYPE_CHECKING:
    from vericache_core.bench.throughput.engines import Shop
    from vericache_core.bench.throughput.measured import System

COMPRESSORS: Final = ("snapkv:keep=0.25",)
COMPRESSING: Final = ("vericache", "auto", "lockstep", "lossy")
"""Systems with a compressor; a peer that has one is kvpress."""
_TIERS: Final = ("device", "host", "disk")
_NOT_SET: Final = {
    "compressor": "compressors are named with -c",
    "options": "options of a compressor are given with -c NAME:KEY=VALUE",
    "keep": "what a compressor keeps is given with -c NAME:keep=X",
    "keep_tokens": "what a compressor keeps is given with -c NAME:keep_tokens=N",
    "dtype": "it is given with --dtype",
    "threads": "it is given with --threads",
    "full_kv": "it is given with --full-kv",
    "device_budget": "each workload has a cap of its own on device KV, or none",
}
"""Settings that ``--set`` would only seem to change, and what to do instead."""
_FLAGS: Final = ("dtype", "threads", "full_kv")
"""Those of them that the environment may set, below the flag."""
_USED_BY: Final = {
    "window": ("vericache", "lockstep", "ngram"),
    "mode": ("vericache", "lockstep", "lossy"),
    "scheduler": (PLAIN, "vericache", "auto", "ngram"),
    "proposer": ("vericache", "auto", "lockstep"),
    "assistant": ("vericache", "auto", "lockstep"),
}
"""Settings of which some systems have a value of their own, and who takes that of ``--set``."""
KEEP: Final = 0.25
"""Of a peer's press when no compressor of ours has such an option."""


def add_arguments(actions: Any) -> None:
    """Declare ``throughput`` and its arguments among the actions of ``bench``."""
    parser = actions.add_parser("throughput", help="tokens per second of this engine and of others, on the same prompts")
    parser.set_defaults(run=run)
    _declare(parser)


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", default="demo", help="as for generate [%(default)s]")
    parser.add_argument(
        "-c",
        "--compressor",
        "--compressors",
        dest="compressors",
        metavar="NAME[:KEY=VALUE,...]",
        action="append",
        help=f"a compressor to draft with (repeatable) [{' '.join(COMPRESSORS)}]",
    )
    parser.add_argument("--systems", metavar="A,B", help=f"of {', '.join(SYSTEMS)} [all]; plain always runs")
    parser.add_argument("--workloads", metavar="A,B", help=f"of {', '.join([*SHAPES, *GROUPS])} [{','.join(DEFAULT)}]")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="requests side by side [%(default)s]")
    parser.add_argument(
        "--context", type=int, action="append", metavar="N", help="tokens of the longest prompt (repeatable) [8000]"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens to generate [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each system [%(default)s]")
    parser.add_argument(
        "--window",
        dest="windows",
        action="append",
        metavar="N|auto",
        help="window of vericache (repeatable) [the engine's own]",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads, of peers too")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="[VERICACHE_DTYPE, or auto]")
    parser.add_argument("--full-kv", choices=_TIERS, help="[VERICACHE_FULL_KV, or device]")
    parser.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", help="field of the engine's configuration (repeatable)"
    )
    parser.add_argument(
        "--peer",
        dest="peers",
        metavar="NAME=PYTHON",
        action="append",
        help=f"a system in another environment, by its python (repeatable): {', '.join(KINDS)}",
    )
    parser.add_argument("--peer-timeout", type=float, default=1800, metavar="S", help="for one answer [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order of the runs [%(default)s]")
    parser.add_argument("--no-plugins", action="store_true", help="only the compressors inside the core")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there, after every run")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots there, after every run")
    parser.add_argument("--lines", metavar="FILE", help="write every run there as soon as it is done")
    parser.add_argument("--render", metavar="FILE", help="measure nothing: show the runs that --lines wrote there")


def run(args: argparse.Namespace) -> int:
    """Measure; exit 1 when a system that promises plain's tokens gave others or failed."""
    kinds = _systems(args.systems)
    compressing = bool(set(COMPRESSING) & set(kinds)) or any(text.startswith("kvpress=") for text in args.peers or ())
    refuse_idle(args, _declare, _idle_flags(kinds, compressing=compressing))
    if args.render is not None:
        head, records = read_lines(Path(args.render))
        report = Report(head, args)
        report.records = records
        report.write()
        return report.end()
    contexts = _check_sizes(args)
    names = names_of(_listed(args.workloads) or DEFAULT)
    peers = _peers(args.peers or ())
    windows = list(dict.fromkeys(_window(text) for text in args.windows or ()))
    registry = Registry.from_env(no_plugins=args.no_plugins)
    set_default_registry(registry)
    wanted = dict.fromkeys(args.compressors or COMPRESSORS) if compressing else ()
    settings = [setting_from_text(text, registry) for text in wanted]
    config = _config(args, kinds)

    from vericache_core.bench.throughput.contest import contest
    from vericache_core.bench.throughput.engines import Shop
    from vericache_core.bench.throughput.workloads import build_workloads
    from vericache_core.engine import Engine

    report = Report(_conditions(args, config), args)  # a file that cannot be written must not wait for the model
    loaded = Engine.from_pretrained(args.model, config, proposer="none")  # systems that want one make their own
    shop = Shop(loaded.adapter.model, loaded.tokenizer, config, registry, note)
    systems: list[System] = []
    try:
        _check_length(max(contexts), args.new_tokens, loaded.adapter.max_positions)
        workloads = build_workloads(loaded.tokenizer, names, args.requests, contexts, args.new_tokens)
        systems += own_systems(shop, kinds, settings, windows)
        systems += [system for name, python in peers for system in _peers_of(name, python, shop, args, settings)]
        loaded.close()
        try:
            for record, repetition, last in contest(systems, workloads, args.repeats, args.seed, note):
                report.add(record, repetition, last)
        except KeyboardInterrupt:
            report.end()  # what is there is worth reading
            raise
        return report.end()
    finally:
        for system in systems:
            system.close()
        shop.close()


def _idle_flags(kinds: Sequence[str], *, compressing: bool) -> list[IdleFlags]:
    measuring = (
        *("model", "compressors", "systems", "workloads", "requests", "context", "new_tokens", "repeats", "windows"),
        *("threads", "dtype", "full_kv", "changes", "peers", "peer_timeout", "seed", "no_plugins", "lines"),
    )
    return [
        IdleFlags(measuring, lambda args: args.render is not None, "--render measures nothing"),
        IdleFlags(("windows",), lambda _: "vericache" not in kinds, "of the systems only vericache takes a window"),
        IdleFlags(("compressors",), lambda _: not compressing, "none of the systems takes a compressor"),
        IdleFlags(("peer_timeout",), lambda args: not args.peers, "no --peer is asked"),
    ]


def _check_sizes(args: argparse.Namespace) -> list[int]:
    contexts: list[int] = args.context or [8000]
    least = {"requests": 1, "new_tokens": 4, "repeats": 1}
    for name, low in least.items():
        if getattr(args, name) < low:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {low}")
    if min(contexts) < 64:
        raise UsageError("--context must be at least 64")
    if args.threads is not None and args.threads < 1:
        raise UsageError("--threads must be at least 1")
    if not args.peer_timeout > 0:
        raise UsageError("--peer-timeout must be more than 0")
    return list(dict.fromkeys(contexts))


def _check_length(context: int, new_tokens: int, limit: int | None) -> None:
    if limit is not None and context + new_tokens > limit:
        raise UsageError(
            f"--context {context} and --new-tokens {new_tokens} exceed the model's {limit} positions",
            hint=f"--context {limit - new_tokens} fits",
        )


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _systems(text: str | None) -> list[str]:
    wanted = _listed(text) or list(SYSTEMS)
    for name in wanted:
        if name not in (*SYSTEMS, PLAIN):
            near = did_you_mean(name, SYSTEMS)
            suffix = f"; did you mean {near!r}?" if near else ""
            raise UsageError(f"unknown system {name!r}{suffix}", hint=f"systems: {', '.join(SYSTEMS)}")
    return wanted


def _peers(texts: Sequence[str]) -> list[tuple[str, str]]:
    found = [parse_peer(text) for text in texts]
    for number, (name, _) in enumerate(found):
        if name in [other for other, _ in found[:number]]:
            raise UsageError(f"--peer {name} is given twice", hint="one environment of each")
    return found


def _window(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--window {text}: neither a positive number nor auto")
    return int(text)


def _config(args: argparse.Namespace, kinds: Sequence[str]) -> EngineConfig:
    """What the environment and the arguments say; compressor, window and mode are those of each system."""
    changes = settings_from_text(args.changes or ())
    for name, instead in _NOT_SET.items():
        if name in changes:
            raise UsageError(f"--set {name}: {instead}", hint="leave it out")
    for name, systems in _USED_BY.items():
        using = [one for one in systems if name != "window" or one != "vericache" or not args.windows]
        if name in changes and not set(using) & set(kinds):
            raise UsageError(
                f"--set {name} has no effect", cause=f"of the systems only {', '.join(using)} take it", hint="leave it out"
            )
    flags = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    resolved = resolve_config(overrides=flags | changes)
    for name, instead in _NOT_SET.items():
        if resolved.sources.get(name) == "environment" and name not in _FLAGS:
            raise UsageError(f"{ENV_PREFIX}{name.upper()}: {instead}", hint="unset it")
    config = resolved.config if "full_kv" in resolved.sources else replace(resolved.config, full_kv="device")
    if config.full_kv not in _TIERS:
        raise UsageError(f"full_kv={config.full_kv}: a store is not measured here", hint=f"--full-kv {', '.join(_TIERS)}")
    return config


def _peers_of(
    name: str, python: str, shop: Shop, args: argparse.Namespace, settings: Sequence[tuple[str, dict[str, Any]]]
) -> list[PeerSystem]:
    """The systems of one peer: kvpress is two, with its press at the keep of our first compressor and without."""
    dtype = str(next(shop.model.parameters()).dtype).removeprefix("torch.")
    load = {"model": str(shop.model.name_or_path), "dtype": dtype, "threads": shop.config.threads or os.cpu_count() or 1}
    if name == "kvpress":
        keep = next((float(options["keep"]) for _, options in settings if "keep" in options), KEEP)
        variants: dict[str, dict[str, Any]] = {f"{name} snapkv:keep={keep:g}": {"keep": keep}, name: {"keep": None}}
    elif name == "llama-cpp":
        variants = {name: {"gguf": _gguf(args.model, dtype)}}
    else:
        variants = {name: {}}
    return [
        PeerSystem(label, python, KINDS[name], {**load, **more}, args.peer_timeout, shop.token_bytes())
        for label, more in variants.items()
    ]


def _gguf(model: str, dtype: str) -> str | None:
    """The GGUF file behind a model name, its weights in ``dtype``; ``None`` if there is no such file."""
    from vericache_core.bench.throughput.gguf_weights import widened
    from vericache_core.model.load import demo_file

    file = demo_file() if model == "demo" else Path(model)
    return str(widened(file, dtype)) if file.suffix == ".gguf" else None


def _conditions(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    import torch
    import transformers

    from vericache_core.runtime.backend import choose_attention

    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    return {
        "model": args.model,
        "seed": args.seed,
        "repeats": args.repeats,
        "threads": config.threads or torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "device": device,
        "attention": choose_attention(config.attention, torch.device(device))[0],
        "dtype": config.dtype,
        "rows": config.rows,
        "full_kv": config.full_kv,
        "vericache": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
