"""``vericache simulate``: what VeriCache would gain on some hardware, by the schedulers that run it and a virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from vericache_core.cli import (
    simulate_compare,
    simulate_fleet,
    simulate_list,
    simulate_proposer,
    simulate_rows,
    simulate_windows,
    simulate_workload,
)
from vericache_core.cli.idle import refuse_idle
from vericache_core.cli.output import print_json, print_table
from vericache_core.cli.simulate_idle import IDLE
from vericache_core.errors import ConfigError, UsageError
from vericache_core.plugins.fields import did_you_mean
from vericache_core.runtime.calibration import load_calibration
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.compression import Compression
from vericache_core.simulate.hardware import DEVICES, MODELS, Device, ModelShape, copying, cost_model

SCHEMA: Final = "vericache.simulate/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare machine, model, compressor, workload and choices."""
    parser.add_argument("--list", action="store_true", help="show devices and models with the sources of their numbers")
    parser.add_argument(
        "--device", dest="devices", metavar="NAME", action="append", help="repeatable; see --list [rtx-pro-6000]"
    )
    parser.add_argument("--count", type=int, default=1, metavar="N", help="devices of a kind side by side [%(default)s]")
    parser.add_argument("-m", "--model", default="qwen-32b", metavar="NAME", help="see --list [%(default)s]")
    parser.add_argument("--calibration", metavar="FILE", help="costs measured on a machine, in place of a device's")
    parser.add_argument("--kv-memory", type=float, metavar="GB", help="device memory for KV [0.9 of it, less the weights]")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="host memory for KV; unlimited otherwise")
    parser.add_argument("--keep", type=float, default=0.2, help="draft KV as a fraction of the full KV [%(default)s]")
    parser.add_argument(
        "--hazard",
        default="0.02",
        metavar="H[/H...][,...]",
        help="chance per draft to differ, dealt to requests in turn; with slashes it changes while a request is written [0.02]",
    )
    parser.add_argument("--hazard-turn", type=int, default=100, metavar="N", help="tokens after which it changes [%(default)s]")
    parser.add_argument(
        "--swap",
        choices=("missing", "all"),
        default="missing",
        help="what a verify swaps in: what the draft KV lacks (token dropping) or everything [%(default)s]",
    )
    parser.add_argument(
        "--ring",
        type=int,
        default=0,
        metavar="LAYERS",
        help="stream full KV in during the verify, so many layers at a time, as the engine does; "
        "0: the whole cache, ahead of it [%(default)s]",
    )
    parser.add_argument(
        "--background",
        action=argparse.BooleanOptionalAction,
        help="with --ring: verifies whose swap takes longer than a step run beside the steps of others [yes]",
    )
    parser.add_argument("--window", default="auto", metavar="N|auto", help="drafts before a verify [%(default)s]")
    parser.add_argument("--mode", choices=("auto", "plain", "pinned", "offloaded"), default="auto", help="[%(default)s]")
    parser.add_argument("--scheduler", choices=("staggered", "lockstep"), default="staggered", help="[%(default)s]")
    parser.add_argument("--tier", choices=("host", "disk"), default="host", help="of offloaded full KV [%(default)s]")
    simulate_workload.add_arguments(parser)
    parser.add_argument("--prefill", action="store_true", help="compute the prompts; otherwise their KV is there already")
    simulate_proposer.add_arguments(parser)
    simulate_fleet.add_arguments(parser)
    simulate_windows.add_arguments(parser)
    simulate_compare.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Simulate plain decoding and VeriCache on each device."""
    if args.list:
        return simulate_list.run(as_json=args.json)
    refuse_idle(args, add_arguments, IDLE)
    if args.compare:
        return simulate_compare.run(args, _pick("model", args.model, MODELS).token_bytes)
    arrivals = simulate_workload.arrivals(args, _means(_turns(args.hazard)))
    rows: list[dict[str, Any]] = []
    for name in args.devices or ["rtx-pro-6000"]:
        device, model = _pick("device", name, DEVICES), _pick("model", args.model, MODELS)
        setup = _setup(args, device, model, arrivals)
        if args.drafters is not None:
            if len(args.devices or []) > 1:
                raise UsageError("--drafters takes one --device at a time")
            return simulate_fleet.run(args, setup, args.model, name)
        if args.search_windows:
            if len(args.devices or []) > 1:
                raise UsageError("--search-windows takes one --device at a time")
            return simulate_windows.run(args, setup, args.model, name)
        plain = simulate(replace(setup, mode="plain", window=None, lookups=()))
        rows.append(simulate_rows.row(name, "plain", plain, plain, setup, model.weights))
        if args.mode != "plain" or setup.lookups:
            system = f"{args.scheduler} {args.mode}" + (f" {args.proposer}" if setup.lookups else "")
            rows.append(simulate_rows.row(name, system, simulate(setup), plain, setup, model.weights))
    if args.json:
        print_json(SCHEMA, {"model": args.model, "requests": len(arrivals), "seed": args.seed, "rows": rows})
    else:
        print_table(simulate_rows.HEADER, [simulate_rows.cells(row) for row in rows])
    return 0


def _setup(args: argparse.Namespace, device: Device, model: ModelShape, arrivals: Sequence[Arrival]) -> Setup:
    if not 0 < args.keep <= 1:
        raise UsageError(f"--keep: expected more than 0 and at most 1, got {args.keep:g}")
    if args.ring < 0:
        raise UsageError(f"--ring: expected 0 or more, got {args.ring}")
    if args.hazard_turn < 1:
        raise UsageError(f"--hazard-turn: expected 1 or more, got {args.hazard_turn}")
    if args.count < 1:
        raise UsageError(f"--count: expected 1 or more, got {args.count}")
    for name in ("kv_memory", "host_memory"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')}: expected more than 0, got {value:g}")
    memory = 0.9 * device.memory * args.count - model.weights if args.kv_memory is None else args.kv_memory * 1e9
    if memory <= 0:
        raise ConfigError(
            f"{model.name} does not fit on {args.count} x {device.name}",
            cause=f"{model.weights / 1e9:.1f} GB of weights, {0.9 * device.memory * args.count / 1e9:.1f} GB of memory",
            hint="--count 2, or another device",
        )
    turns = _turns(args.hazard)
    mean = sum(_means(turns)) / len(turns)
    believed = min(0.999, max(0.001, mean))
    calibration = load_calibration(args.calibration) if args.calibration else None
    costs = cost_model(device, model, args.count) if calibration is None else calibration.costs
    return Setup(
        costs,
        model.token_bytes,
        Bytes(memory, float("inf") if args.host_memory is None else args.host_memory * 1e9),
        arrivals,
        Compression(args.keep, mean, args.swap == "missing", args.ring),
        args.mode,
        _window(args),
        args.scheduler,
        args.tier,
        args.prefill,
        Prior(believed, 24.0),
        seed=args.seed,
        turns=turns if any(len(one) > 1 for one in turns) else (),
        turn=args.hazard_turn,
        background=args.background is not False,
        copies=copying(device, costs, args.tier, calibration) if args.mode in ("auto", "offloaded") else 0.0,
        between=device.between,
        lookups=simulate_proposer.lookups(args),
    )


def _turns(text: str) -> tuple[tuple[float, ...], ...]:
    """By request the hazards that take turns."""
    try:
        hazards = tuple(tuple(float(turn) for turn in part.split("/")) for part in text.split(","))
    except ValueError:
        hazards = ()
    if not hazards or not all(0 <= hazard <= 1 for turns in hazards for hazard in turns):
        raise UsageError(f"--hazard: expected numbers from 0 to 1 with commas or slashes between them, got {text!r}")
    return hazards


def _means(turns: Sequence[Sequence[float]]) -> list[float]:
    return [sum(one) / len(one) for one in turns]


def _window(args: argparse.Namespace) -> int | None:
    if args.window == "auto":
        return None
    if args.mode == "plain":
        raise UsageError("--window and --mode plain are both given", hint="plain decoding drafts nothing")
    try:
        return int(args.window)
    except ValueError:
        raise UsageError(f"--window: expected a number or auto, got {args.window!r}") from None


def _pick(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        near = did_you_mean(name, known)
        suffix = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"unknown {what} {name!r}{suffix}", hint=f"known: {', '.join(known)}")
    return known[name]
