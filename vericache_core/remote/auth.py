"""Who may talk to the store, and how both sides encrypt: a token per tenant, TLS, certificates of clients.

A tenant is whoever holds a token of the token file (or the subject of a client certificate). Sessions and prefixes of
one tenant do not exist for another.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc

from vericache_core.errors import UsageError
from vericache_core.service.access import SCHEME, read_file, read_pair, tenant_of

HEADER: Final = "authorization"


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
        return tenant_of(shown[len(SCHEME) :], self._tokens)

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
    pair = read_pair(cert, key)
    authority = None if client_ca is None else _authority(client_ca, "client CA")
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(authority: str, cert: str | None, key: str | None) -> Any:
    """TLS of the drafting side; raises as :func:`server_credentials` does."""
    own = (None, None) if cert is None or key is None else read_pair(cert, key)
    return grpc.ssl_channel_credentials(_authority(authority, "CA file"), *own)


def _authority(name: str, what: str) -> bytes:
    """Content of a file of certificates."""
    content = read_file(name, what)
    try:  # comments between certificates may be in any alphabet
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{what} {name!r} holds no certificate", cause=str(error), hint="a PEM file") from error
    return content
