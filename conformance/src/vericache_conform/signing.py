"""Ed25519 signatures of passports. Needs the extra ``signing`` (``cryptography``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vericache_conform.report.write import write_whole
from vericache_core.errors import MissingDependencyError, UsageError
from vericache_core.plugins.passport import read_passport, signed_bytes


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write a new key pair into ``folder``; the private key is readable by its owner only.

    Raises:
        UsageError: the folder does not exist, or holds a key already.
    """
    serialization, ed25519 = _cryptography()
    private, public = folder / "vericache-signing-key.pem", folder / "vericache-signing-key.pub.pem"
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is no folder")
    if private.exists():
        raise UsageError(f"{str(private)!r} exists already", hint="keys are never overwritten")
    key = ed25519.Ed25519PrivateKey.generate()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(secret)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def sign_file(path: Path, key_file: Path) -> None:
    """Sign a passport in place.

    Raises:
        UsageError: the key cannot be read.
    """
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"key {str(key_file)!r} cannot be read", cause=str(error)) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{str(key_file)!r} is no Ed25519 private key")
    passport = read_passport(path)
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    value = key.sign(signed_bytes(passport)).hex()
    passport["signature"] = {"algorithm": "ed25519", "key": public.hex(), "value": value}
    write_whole(path, json.dumps(passport, indent=2, sort_keys=True) + "\n")


def verify(passport: dict[str, Any], key_file: Path) -> str:
    """``valid``, ``unsigned``, ``signed with another key`` or ``forged`` (the content does not fit the signature).

    Raises:
        UsageError: the key cannot be read.
    """
    signature = passport.get("signature")
    if not signature:
        return "unsigned"
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_public_key(key_file.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"key {str(key_file)!r} cannot be read", cause=str(error)) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise UsageError(f"{str(key_file)!r} is no Ed25519 public key")
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    if not isinstance(signature, dict) or signature.get("key") != raw.hex():
        return "signed with another key"
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(str(signature.get("value"))), signed_bytes(passport))
    except (InvalidSignature, ValueError):
        return "forged"
    return "valid"


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingDependencyError(
            "signatures need the package 'cryptography'", hint="pip install 'vericache-conform[signing]'"
        ) from None
    return serialization, ed25519
