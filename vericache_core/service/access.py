"""Who may talk to a service: files of tokens, certificates, and addresses that nobody else can reach."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vericache_core.errors import UsageError

SCHEME: Final = "Bearer "
SHORTEST: Final = 16
"""Characters that a token has at least."""


def read_file(name: str, what: str) -> bytes:
    """Content of a file, or ``UsageError`` naming it."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{what} {name!r} cannot be read", cause=error.strerror) from error


def read_tokens(file: str) -> dict[str, bytes]:
    """Tenants and SHA-256 of their tokens: a line each, ``TENANT:TOKEN`` or ``TOKEN`` of tenant ``default``; # comments.

    Raises:
        UsageError: no token, one too short, or one given twice.
    """
    tokens: dict[str, bytes] = {}
    lines = read_file(file, "token file").decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        tenant, _, token = text.rpartition(":")
        if len(token) < SHORTEST:
            raise UsageError(f"{file}:{number}: a token of {len(token)} characters", hint=f"use at least {SHORTEST}")
        tenant, digest = tenant or "default", _hashed(token)
        if tenant in tokens or digest in tokens.values():
            raise UsageError(f"{file}:{number}: tenant {tenant!r} or its token is there already", hint="one token for each")
        tokens[tenant] = digest
    if not tokens:
        raise UsageError(f"token file {file!r} holds no token", hint="openssl rand -hex 32")
    return tokens


def own_token(file: str) -> str:
    """The one token that this side shows.

    Raises:
        UsageError: the file holds none, or several.
    """
    lines = [line.strip() for line in read_file(file, "token file").decode("utf-8", "replace").splitlines()]
    found = [line.rpartition(":")[2] for line in lines if line and not line.startswith("#")]
    if len(found) != 1:
        raise UsageError(f"token file {file!r} holds {len(found)} tokens", hint="this side shows exactly one")
    return found[0]


def is_loopback(address: str) -> bool:
    """Whether ``HOST:PORT`` (or ``[HOST]:PORT``) cannot be reached from another machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tenant_of(token: str, tokens: Mapping[str, bytes]) -> str | None:
    """Whose token of :func:`read_tokens` this is, compared in constant time; None if nobody's."""
    digest, found = _hashed(token), None
    for tenant, known in tokens.items():
        if hmac.compare_digest(digest, known):
            found = tenant
    return found


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Contents of a key and of its certificate; ``UsageError`` where they are none, or do not belong together."""
    pair = read_file(key, "TLS key"), read_file(cert, "TLS certificate")
    try:  # by name once more: ssl takes a key from a file alone
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # nobody is asked for one
    except ssl.SSLError as error:
        raise UsageError(
            f"{cert!r} and {key!r} are no certificate and its key",
            cause=str(error),
            hint="PEM files, the key without a password",
        ) from error
    return pair
