"""``vericache-conform run NAME...``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from vericache_conform.catalogue import select
from vericache_conform.check import TIERS
from vericache_conform.cli.timeouts import add_timeout_factor, timeout_factor
from vericache_conform.isolation import DEFAULT_MEMORY
from vericache_conform.outcome import Result
from vericache_conform.report.model import Report, dump, line_of
from vericache_conform.report.terminal import Screen, print_report
from vericache_conform.report.write import add_format_arguments, write_formats
from vericache_conform.runner import Plan, exit_status, run_isolated
from vericache_core.errors import UsageError
from vericache_core.plugins.fields import parse_pairs

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="an installed compressor, or module:SPEC")
    parser.add_argument(
        "--tier", action="append", choices=TIERS, help="which checks (repeatable) [static, contract and runtime]"
    )
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="just this check (repeatable)")
    parser.add_argument(
        "--budget", metavar="TIME", help="per compressor, such as 10s or 2m: the checks that fit by recorded cost"
    )
    parser.add_argument("-o", "--option", dest="options", action="append", metavar="KEY=VALUE", help="option of the compressor")
    parser.add_argument("-m", "--model", default="demo", help="real model of the model tier [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn [%(default)s]")
    parser.add_argument(
        "--level",
        choices=("passed", "certified"),
        default="passed",
        help="certified allows no undeclared skip, no gap [passed]",
    )
    parser.add_argument("--expected", metavar="FILE", help="a conformance.toml instead of the plugin's own")
    add_timeout_factor(parser)
    parser.add_argument(
        "--memory", default=f"{DEFAULT_MEMORY >> 30}G", metavar="SIZE", help="limit of a check, or none [%(default)s]"
    )
    parser.add_argument("--passport", action="store_true", help="write a passport into the package of each compressor")
    parser.add_argument("--sign", metavar="KEY", help="sign the passports with this Ed25519 key (PEM)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout: header, results, footer")
    add_format_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the checks, show them as they come, write the reports."""
    plan = _plan(args)
    screen = Screen(show=not args.json)
    started = time.perf_counter()

    def begin(report: Report) -> None:
        if args.json:
            print(dump(report.header), flush=True)

    def listen(result: Result, done: int, total: int) -> None:
        if args.json:
            print(dump(line_of(result)), flush=True)
        screen.result(result, done, total)

    with screen:
        report = run_isolated(plan, listen, begin)
    status = exit_status(report, args.level)
    footer = report.finish(status, time.perf_counter() - started)
    if args.json:
        print(dump(footer), flush=True)
    write_formats(report, args)
    if args.passport or args.sign:
        _passports(report, args)
    if not args.json:
        print_report(report)
    return status


def _plan(args: argparse.Namespace) -> Plan:
    try:
        options = parse_pairs(args.options or [])
    except ValueError as error:
        raise UsageError(f"-o: {error}", hint="write -o key=value") from None
    budget = None if args.budget is None else _seconds(args.budget)
    checks = select(args.tier or (), args.check, budget)
    if not checks:
        raise UsageError("no check fits", hint="raise --budget or choose another --tier")
    return Plan(
        list(dict.fromkeys(args.names)),
        checks,
        options,
        args.seed,
        args.model,
        _bytes(args.memory),
        timeout_factor(args),
        None if args.expected is None else _file(args.expected),
    )


def _file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--expected: {name!r} is no file")
    return path.resolve()


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match:
        raise UsageError(f"--budget: {text!r} is no time", hint="write 30s, 2m or 1h")
    return float(match.group(1)) * _UNITS.get(match.group(2) or "s", 1.0)


def _bytes(text: str) -> int | None:
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match:
        raise UsageError(f"--memory: {text!r} is no size", hint="write 4G, 512M or none")
    return int(match.group(1)) * _SIZES.get(match.group(2), 1)


def _passports(report: Report, args: argparse.Namespace) -> None:
    from vericache_conform.passports import write_passports

    for line in write_passports(report, None if args.sign is None else Path(args.sign)):
        _note(line)


def _note(text: Any) -> None:
    print(f"vericache-conform: {text}", file=sys.stderr)
