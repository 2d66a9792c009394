"""``vericache bench compressors``: every compressor on four long prompts, and whether the output stayed the same."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vericache_core.cli import bench_throughput, bench_transport
from vericache_core.cli.engine_args import setting_from_text
from vericache_core.cli.output import note, print_table
from vericache_core.config import EngineConfig
from vericache_core.errors import UsageError
from vericache_core.plugins.composed import is_composed, parts_of
from vericache_core.plugins.registry import Registry, set_default_registry

if TYPE_CHECKING:
    from vericache_core.bench.compressors import Row, Setting
    from vericache_core.bench.prompts import BenchPrompt

DEFAULTS: Final = (
    "random:keep=0.25",
    "snapkv:keep=0.5",
    "snapkv:keep=0.25",
    "snapkv:keep=0.1",
    "kvzip:keep=0.25",
    "kivi:bits=4",
    "kivi:bits=2",
    "turboquant:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=2",
    "snapkv+kivi:snapkv.keep=0.5,kivi.bits=4",
)
"""Settings that are measured when none is named; those whose compressor is not installed are left out."""

_HEADER: Final = [
    "COMPRESSOR",
    "PROMPT",
    "BYTES",
    "x4",
    "x8",
    "x16",
    "x32",
    "HAZARD",
    "KL",
    "DIVERGES",
    "PARSES",
    "TIME",
    "SAME",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``compressors`` and its arguments."""
    actions = parser.add_subparsers(dest="action", metavar="{compressors,throughput,transport}", required=True)
    bench_throughput.add_arguments(actions)
    bench_transport.add_arguments(actions)
    table = actions.add_parser("compressors", help="bytes, accepted drafts, KL and identity of each compressor")
    table.add_argument("-m", "--model", default="demo", help="as for generate [%(default)s]")
    table.add_argument(
        "-c",
        "--compressor",
        dest="settings",
        metavar="NAME[:KEY=VALUE,...]",
        action="append",
        help="a setting to measure (repeatable); a list of common ones otherwise",
    )
    table.add_argument("--prompt", dest="prompts", metavar="NAME", action="append", help="only these prompts (repeatable)")
    table.add_argument("--context", type=int, default=4000, metavar="N", help="tokens of each prompt [%(default)s]")
    table.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens to generate [%(default)s]")
    table.add_argument("--window", type=int, default=8, metavar="N", help="window of the real runs [%(default)s]")
    table.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    table.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    table.add_argument("--no-plugins", action="store_true", help="only the compressors inside the core")
    table.add_argument("--json", action="store_true", help="one JSON object a line")
    table.add_argument("--markdown", metavar="FILE", help="write the table there, too")
    table.add_argument(
        "--lines", metavar="FILE", help="append each row as a JSON line, and do not measure again what is there already"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; exit 1 when an output was not identical."""
    if args.action == "throughput":
        return bench_throughput.run(args)
    if args.action == "transport":
        return bench_transport.run(args)
    for name in ("context", "new_tokens", "window"):
        if getattr(args, name) < 2:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 2")
    registry = Registry.from_env(no_plugins=args.no_plugins)
    set_default_registry(registry)
    settings = _settings(args.settings, registry)

    from vericache_core.bench.compressors import bench_compressors
    from vericache_core.bench.lines import SCHEMA, LinesFile, as_line
    from vericache_core.bench.prompts import build_prompts
    from vericache_core.engine import Engine

    # Lock-step: a first round that drafts to the end must not be cut at the longest window of the staggered one.
    config = EngineConfig(dtype=args.dtype, threads=args.threads, window=args.window, scheduler="lockstep")
    run = {"context": args.context, "new_tokens": args.new_tokens, "window": args.window, "dtype": args.dtype}
    head = {"schema": SCHEMA, "model": args.model, "run": run}
    lines = LinesFile(args.lines, head)
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        note(" ".join(part.strip() for part in cells(row)))
        if args.json:
            print(as_line(head, row), flush=True)
        if args.markdown:
            Path(args.markdown).write_text(markdown(rows), encoding="utf-8")

    def known(setting: Setting, prompt: BenchPrompt) -> bool:
        row = lines.find(setting, prompt.name)
        if row is not None:
            show(row)
        return row is not None

    with Engine.from_pretrained(args.model, config) as engine:
        prompts = build_prompts(engine.tokenizer, engine.adapter.vocab_size, args.context, args.prompts)
        for row in bench_compressors(engine, registry, settings, prompts, args.new_tokens, _Seldom(), known):
            lines.add(row)
            show(row)
    if not args.json:
        print_table(_HEADER, [cells(row) for row in rows])
    return 0 if all(row.identical for row in rows) else 1


class _Seldom:
    """Says on standard error where the measurement stands: each new stage, and every ten seconds of one."""

    def __init__(self) -> None:
        self._stage, self._next = "", 0.0

    def __call__(self, text: str) -> None:
        stage, now = text.rpartition(":")[0], time.monotonic()
        if stage != self._stage or now >= self._next:
            self._stage, self._next = stage, now + 10
            note(text)


def _settings(given: Sequence[str] | None, registry: Registry) -> list[Setting]:
    from vericache_core.bench.compressors import Setting

    installed = set(registry.names())
    found = []
    for text in given or DEFAULTS:
        name = text.partition(":")[0]
        parts = parts_of(name) if is_composed(name) else (name,)
        if given is None and not installed.issuperset(parts):
            continue
        found.append(Setting(*setting_from_text(text, registry)))
    return found


def cells(row: Row) -> list[str]:
    """A row as text, in the order of the header."""
    name = row.compressor + "".join(f" {key.rpartition('.')[2]}={value}" for key, value in row.options.items())
    if row.error is not None:
        return [name, row.prompt, *["-"] * 9, row.error, _yes(row.identical)]
    ratio = None
    if row.compress_seconds is not None and row.prefill_seconds:
        ratio = row.compress_seconds / row.prefill_seconds
    lossy = "-" if row.full_parses is None else f"{_yes(row.lossy_parses)}/{_yes(row.full_parses)}"
    return [
        name,
        row.prompt,
        _figure(row.keep_bytes_fraction, "{:.3f}"),
        *(_figure(value, "{:.2f}") for value in row.accepted_mean.values()),
        _figure(row.hazard, "{:.3f}"),
        _figure(row.kl_nats, "{:.4f}"),
        "never" if row.first_divergence is None else str(row.first_divergence),
        lossy,
        _figure(ratio, "{:.3f}"),
        _yes(row.identical),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, with what its columns mean."""
    lines = [" | ".join(["", *_HEADER, ""]).strip(), "|" + "---|" * len(_HEADER)]
    lines += [" | ".join(["", *cells(row), ""]).strip() for row in rows]
    facts = f"Prompts of about {max((row.prompt_tokens for row in rows), default=0)} tokens."
    return "\n".join([*lines, "", f"{facts} {LEGEND}", ""])


LEGEND: Final = (
    "BYTES: compressed over full KV. x4 to x32: mean drafts accepted before the first rejection at that window. HAZARD: "
    "chance per draft of being the first wrong one. KL: nats per drafted token, full KV against compressed. DIVERGES: "
    "first generated token in which decoding with the compressed KV alone differs. PARSES: its output / that of the full "
    "KV. TIME: compression over prefill. SAME: VeriCache's output equals that of the full KV, every token and logit bit."
)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
