"""``vericache bench transport``: what putting and getting a blob costs in each store, in multiples of a copy."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from vericache_core._version import __version__
from vericache_core.cli.output import note, print_json, print_table
from vericache_core.errors import UsageError
from vericache_core.sizes import parse_size
from vericache_core.stores.url import shown

if TYPE_CHECKING:
    from vericache_core.bench.transport import Ratio, Transport

SCHEMA: Final = "vericache.bench.transport/1"
_OPERATIONS: Final = ("put", "get", "load", "again")


def add_arguments(actions: Any) -> None:
    """Declare ``transport`` and its arguments among the actions of ``bench``."""
    parser = actions.add_parser("transport", help="put and get of a blob in each store, as multiples of a copy in memory")
    parser.set_defaults(run=run)
    parser.add_argument("--size", default="64MiB", help="of the blob [%(default)s]")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="turns of each store [%(default)s]")
    parser.add_argument(
        "--backend",
        dest="backends",
        metavar="NAME|URL",
        action="append",
        help="file, shm, redis, or the URL of a store, s3://bucket?endpoint_url=... (repeatable) [all that are installed]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    """Measure; exit 1 when a store failed."""
    size = parse_size(args.size, "--size")
    if args.repeats < 1:
        raise UsageError("--repeats must be at least 1")
    from vericache_core.bench.transport import measure, opened
    from vericache_core.stores.memory import SharedMemoryBlobs

    load = " ".join(f"{load:.2f}" for load in os.getloadavg())
    with opened(args.backends or (), note) as stores:
        found = measure(stores, size, args.repeats)
        large = {name: store.large_pages for name, store in stores.items() if isinstance(store, SharedMemoryBlobs)}
    if args.json:
        print_json(SCHEMA, {**_conditions(args, load), "large_pages": large, **_figures(found)})
    else:
        _show(found, load)
    for name, given in large.items():
        if given is False:
            note(f"{name}: the system gave no large pages, so a new mapping costs more than it need")
    for name, why in found.failed.items():
        note(f"{shown(name)} failed: {why}")
    return 1 if found.failed else 0


def _show(found: Transport, load: str) -> None:
    rows = [
        [shown(name), *(_cell(found.ratio(getattr(times, operation))) for operation in _OPERATIONS), _verdict(found, name)]
        for name, times in found.backends.items()
    ]
    print_table(["STORE", "PUT", "GET", "GET+COPY", "COPY AGAIN", "GOAL"], rows)
    copy = statistics.median(found.memcpy)
    print(
        f"\nmultiples of a copy of {found.size:,} bytes into fresh memory, {copy * 1e3:.1f} ms; "
        f"median (least to most) of {len(found.memcpy)}; load before {load}"
    )
    print(
        "GET of a mapped store (file, shm) reads no byte yet; GET+COPY fills a buffer that was there before, through a new\n"
        "mapping; COPY AGAIN does it once more from the same one."
    )


def _cell(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"


def _verdict(found: Transport, name: str) -> str:
    goal = found.goal(name)
    if goal is None:
        return "-"
    operation, most, met = goal
    return f"{'GET+COPY' if operation == 'load' else operation.upper()} at most {most:g}: {'met' if met else 'missed'}"


def _conditions(args: argparse.Namespace, load: str) -> dict[str, Any]:
    return {
        "repeats": args.repeats,
        "load_before": load,
        "cpus": os.cpu_count(),
        "vericache": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _figures(found: Transport) -> dict[str, Any]:
    backends = {}
    for name, times in found.backends.items():
        goal = found.goal(name)
        backends[shown(name)] = {
            **{operation: asdict(found.ratio(getattr(times, operation))) for operation in _OPERATIONS},
            "goal": None if goal is None else {"operation": goal[0], "most": goal[1], "met": goal[2]},
            "seconds": asdict(times),
        }
    return {
        "size": found.size,
        "memcpy_seconds": found.memcpy,
        "backends": backends,
        "failed": {shown(name): why for name, why in found.failed.items()},
    }
