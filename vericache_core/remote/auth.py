"""Who may talk to the store, and how both sides encrypt: a token per tenant, TLS, certificates of clients.

A tenant is whoever holds a token of the token file (or the subject of a client certificate). Sessions and prefixes of
one tenant do not exist for another.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from vericache_core.errors import UsageError

HEADER: Final = "authorization"
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


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc publishes no types
    """Turns callers without a known token away before anything of their message is looked at.

    Args:
        tokens: of :func:`read_tokens`; ``None`` lets everybody in whom TLS let in.
    """

    def __init__(self, tokens: Mapping[str, bytes] | None) -> None:
        self._tokens = tokens

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        handler = continuation(call)
        if handler is None or self._tokens is None or self.tenant(call.invocation_metadata) is not None:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_turn_away)
        return grpc.unary_unary_rpc_method_handler(_turn_away)

    def tenant(self, metadata: Sequence[tuple[str, Any]]) -> str | None:
        """Who shows this token, compared in constant time; None if nobody."""
        shown = next((value for name, value in metadata if name == HEADER), "")
        if self._tokens is None or not isinstance(shown, str) or not shown.startswith(SCHEME):
            return None
        digest, found = _hashed(shown[len(SCHEME) :]), None
        for tenant, known in self._tokens.items():
            if hmac.compare_digest(digest, known):
                found = tenant
        return found

    def caller(self, context: Any) -> str:
        """Tenant of a call that was let in: by its token, else by its certificate, else ``local``."""
        tenant = self.tenant(context.invocation_metadata())
        if tenant is not None:
            return tenant
        names = [name.decode("utf-8", "replace") for name in context.auth_context().get("x509_subject_alternative_name", [])]
        names = names or [name.decode("utf-8", "replace") for name in context.auth_context().get("x509_common_name", [])]
        return f"certificate {names[0]}" if names else "local"


def _turn_away(_request: bytes, context: Any) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no known token")


def server_credentials(cert: str, key: str, client_ca: str | None) -> Any:
    """TLS of the store; with ``client_ca`` clients must show a certificate.

    Raises:
        UsageError: a file cannot be read or holds something else, which gRPC would only tell with each handshake.
    """
    pair = _pair(cert, key)
    authority = None if client_ca is None else _authority(client_ca, "client CA")
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(authority: str, cert: str | None, key: str | None) -> Any:
    """TLS of the drafting side; raises as :func:`server_credentials` does."""
    own = (None, None) if cert is None or key is None else _pair(cert, key)
    return grpc.ssl_channel_credentials(_authority(authority, "CA file"), *own)


def _pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Contents of a key and of its certificate."""
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


def _authority(name: str, what: str) -> bytes:
    """Content of a file of certificates."""
    content = read_file(name, what)
    try:  # comments between certificates may be in any alphabet
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{what} {name!r} holds no certificate", cause=str(error), hint="a PEM file") from error
    return content


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
