"""``vericache-conform passport show|sign|verify|keygen``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vericache_core.cli.output import print_json
from vericache_core.errors import UsageError
from vericache_core.plugins.passport import passport_path, read_passport
from vericache_core.plugins.registry import Registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", metavar="{show,sign,verify,keygen}", required=True)
    for name, help_text in (
        ("show", "the passport of a compressor"),
        ("sign", "sign the passport of a compressor"),
        ("verify", "verify the signature and whether the passport is still valid"),
    ):
        action = actions.add_parser(name, help=help_text)
        action.add_argument("name", metavar="NAME")
        if name != "show":
            action.add_argument("--key", required=True, metavar="FILE", help="Ed25519 key in PEM form")
    keygen = actions.add_parser("keygen", help="make a key pair")
    keygen.add_argument("folder", metavar="FOLDER")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Run one of the actions."""
    from vericache_conform import signing

    if args.action == "keygen":
        private, public = signing.make_keys(Path(args.folder))
        return _say(args, {"private_key": str(private), "public_key": str(public)})
    module, standing = _standing(args.name)
    path = passport_path(module)
    if path is None or not path.is_file():
        raise UsageError(f"{args.name} has no passport", hint=f"vericache-conform run {args.name} --passport")
    try:
        passport = read_passport(path)
    except ValueError as error:
        raise UsageError(f"{path} is no passport", cause=str(error)) from error
    if args.action == "show":
        return _say(args, {"path": str(path), "standing": standing, "passport": passport})
    if args.action == "sign":
        signing.sign_file(path, Path(args.key))
        return _say(args, {"path": str(path), "signature": "written"})
    verdict = signing.verify(passport, Path(args.key))
    _say(args, {"path": str(path), "signature": verdict, "standing": standing})
    return 0 if verdict == "valid" and standing == "conformant" else 1


def _standing(name: str) -> tuple[str, str]:
    registry = Registry.from_env()
    claims = [info for info in registry.list_plugins() if info.name == name]
    if not claims:
        raise UsageError(f"no installed compressor is called {name!r}", hint="vericache plugins list")
    module = claims[0].target.partition(":")[0]
    return module, registry.conformance(name).standing


def _say(args: argparse.Namespace, facts: dict[str, Any]) -> int:
    if args.json:
        print_json("vericache-conform.passport/1", facts)
    else:
        for key, value in facts.items():
            print(f"{key}: {value}")
    return 0
