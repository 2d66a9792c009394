"""``vericache plugins``: what is installed (imports nothing), does it load, what does it offer, and a new one."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from vericache_core.cli.output import note, print_json, print_table
from vericache_core.config import load_config
from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.plugins.composed import is_composed, parts_of
from vericache_core.plugins.fields import option_fields
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.scaffold import KINDS, write_project
from vericache_core.plugins.schema import options_schema
from vericache_core.plugins.spec import CAPABILITIES, CompressorSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``list``, ``check NAME...``, ``show NAME`` and ``new NAME``."""
    actions = parser.add_subparsers(dest="action", metavar="{list,check,show,new}", required=True)
    listing = actions.add_parser(
        "list",
        help="installed compressors, from package metadata alone",
        description="List installed compressors, importing none: STATUS is ok? until one is loaded (`plugins check NAME`).",
    )
    check = actions.add_parser("check", help="load compressors and say whether they work")
    check.add_argument("names", nargs="+", metavar="NAME")
    show = actions.add_parser("show", help="options and capabilities of a compressor")
    show.add_argument("name", metavar="NAME")
    new = actions.add_parser("new", help="write a plugin project that passes the conformance suite")
    new.add_argument("name", metavar="NAME", help="of the compressor, such as my-method")
    new.add_argument("--kind", choices=KINDS, default=KINDS[0], help="what it does to the cache [%(default)s]")
    new.add_argument("--folder", metavar="FOLDER", help="where to write it [vericache-compressor-NAME]")
    new.add_argument("--json", action="store_true", help="machine-readable output")
    for action in (listing, check, show):
        action.add_argument("--json", action="store_true", help="machine-readable output")
        action.add_argument("--config", metavar="FILE", help="TOML file whose [plugins] table counts")
        action.add_argument("--no-plugins", action="store_true", help="only the compressors inside the core")


def run(args: argparse.Namespace) -> int:
    """Run one of the actions."""
    if args.action == "new":
        return _new(args.name, args.kind, args.folder, as_json=args.json)
    config = load_config(args.config)
    registry = Registry.from_env(disable=config.disable_plugins, no_plugins=args.no_plugins)
    if args.action == "list":
        return _list(registry, as_json=args.json)
    if args.action == "check":
        return _check(registry, args.names, as_json=args.json)
    return _show(registry, args.name, as_json=args.json)


def _list(registry: Registry, *, as_json: bool) -> int:
    infos = registry.list_plugins()
    if as_json:
        print_json("vericache.plugins.list/1", {"plugins": [dataclasses.asdict(info) for info in infos]})
    else:
        rows = [
            [info.name, info.distribution, info.version, info.status, info.conformance, info.reason or info.summary]
            for info in infos
        ]
        print_table(["NAME", "DISTRIBUTION", "VERSION", "STATUS", "CONFORMANCE", "SUMMARY"], rows)
    return 0


def _check(registry: Registry, names: list[str], *, as_json: bool) -> int:
    """Load each compressor and build it with its default options. Exit 1 when one fails, 2 for an unknown name."""
    results: list[dict[str, Any]] = []
    code = 0
    for name in names:
        try:
            registry.create(name)
            spec = registry.spec(name)
        except VeriCacheError as error:
            if isinstance(error, UsageError) and len(names) == 1:
                raise  # a name that is not installed is a mistake of the request, reported like any other
            code = 1
            facts = {"type": type(error).__name__, "message": error.message, "cause": error.cause, "hint": error.hint}
            results.append({"name": name, "status": "failed", "error": facts})
        else:
            results.append(
                {"name": name, "status": "ok", "api_version": spec.api_version, "origin": registry.origin(spec.name)}
            )
    if as_json:
        print_json("vericache.plugins.check/1", {"plugins": results})
        return code
    for result in results:
        if result["status"] == "ok":
            print(f"{result['name']}: OK (API version {result['api_version']}, {result['origin']})")
        else:
            facts = result["error"]
            print(f"{result['name']}: FAILED: {facts['message']}" + (f" ({facts['cause']})" if facts["cause"] else ""))
            if facts["hint"]:
                print(f"  hint: {facts['hint']}")
    return code


def _new(name: str, kind: str, folder: str | None, *, as_json: bool) -> int:
    target = Path(folder or f"vericache-compressor-{name}")
    files = write_project(name, kind, target)
    if as_json:
        print_json("vericache.plugins.new/1", {"name": name, "kind": kind, "folder": str(target), "files": files})
        return 0
    for file in files:
        print(target / file)
    note(f"now: cd {target} && pip install -e . && vericache-conform run {name}")
    if importlib.util.find_spec("vericache_conform") is None:
        note("vericache-conform is not installed; in a clone of vericache: pip install -e conformance")
    return 0


def _show(registry: Registry, name: str, *, as_json: bool) -> int:
    spec = registry.spec(name)
    parts = parts_of(name) if is_composed(name) else (name,)
    infos = [info for part in parts for info in registry.list_plugins() if info.name == part]
    distribution, version = (" + ".join(getattr(info, key) for info in infos) for key in ("distribution", "version"))
    if as_json:
        facts = {
            "name": spec.name,
            "distribution": distribution,
            "version": version,
            "kind": spec.kind,
            "api_version": spec.api_version,
            "summary": spec.summary,
            "origin": registry.origin(name),
            "capabilities": {capability: spec.capability(capability) for capability in CAPABILITIES},
            "options": options_schema(spec.options),
        }
        print_json("vericache.plugins.show/1", facts)
        return 0
    print(f"{spec.name}: {spec.summary}")
    print(f"  {spec.kind}, {distribution} {version}, API version {spec.api_version}")
    print(f"  {registry.origin(name)}")
    _print_options(spec)
    print("\ncapabilities:")
    rows = [["  " + key, spec.capability(key), meaning] for key, (_, meaning) in CAPABILITIES.items()]
    print_table(["  NAME", "SUPPORT", "MEANING"], rows)
    return 0


def _print_options(spec: CompressorSpec) -> None:
    fields = option_fields(spec.options)
    print("\noptions (-o name=value):" if fields else "\nno options")
    if fields:
        rows = [["  " + field.name, field.expectation, str(field.default), field.info.help] for field in fields.values()]
        print_table(["  NAME", "VALUE", "DEFAULT", "MEANING"], rows)
