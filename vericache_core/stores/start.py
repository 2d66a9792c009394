"""Whether a prefix store can be used, seen at start: an error, a warning, or nothing to say.

A store that is away, full or slow costs speed and may come back, so it is only warned of; where ``required=yes`` asks for
one, it must answer reads. One that waiting does not mend, such as a folder that is a file, is an error always.
"""

from __future__ import annotations

import logging
import time
from urllib.parse import urlsplit

from vericache_core.errors import ConfigError, StoreError, StoreTimeout, StoreUnusable
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy
from vericache_core.stores.keys import PROBE
from vericache_core.stores.url import SCHEMES, OpenedStore, open_store, shown

log = logging.getLogger("vericache.stores")


def check_store(url: str) -> None:
    """Look at the store of ``url`` before anything that takes long is begun, and warn of what may pass.

    One that takes much to open is left to :func:`look`, when it is opened to be used.

    Raises:
        ConfigError: the store cannot be used, or is required and does not answer; or as :func:`open_store`.
        MissingDependencyError: as :func:`open_store`.
    """
    scheme = SCHEMES.get(urlsplit(url).scheme)
    if scheme is not None and not scheme.cheap:
        return
    opened = open_store(url)
    client = client_of(opened)
    try:
        warning = look(url, opened, client)
    finally:
        client.close()
    if warning is not None:
        log.warning("%s", warning)


def client_of(opened: OpenedStore) -> StoreClient:
    """What calls of the store go through: not even a folder is sure to answer, on a network's file system."""
    return StoreClient(opened.blobs, ClientPolicy(attempts=opened.attempts))


def look(url: str, opened: OpenedStore, client: StoreClient) -> str | None:
    """What is to be warned of; None where all is well. Takes no longer than a prefix may.

    Raises:
        ConfigError: the store cannot be used, or is required and does not answer.
    """
    deadline = time.monotonic() + opened.timeout
    try:
        client.check(deadline=deadline).result()
    except StoreUnusable as error:
        hint = error.hint or SCHEMES[urlsplit(url).scheme].hint
        why = error.message if error.cause is None else f"{error.message}: {error.cause}"
        raise ConfigError(f"prefix store {shown(url)!r} cannot be used", cause=why, hint=hint) from error
    except StoreError as error:
        if not isinstance(error, StoreTimeout) and _answers(client, deadline):
            return f"prefix store {shown(url)} takes nothing in ({error}); prefixes are loaded but not saved until it does"
        if opened.required:
            hint = "start it; without required=yes it would only be warned of"
            raise ConfigError(f"prefix store {shown(url)!r} does not answer", cause=str(error), hint=hint) from error
        return f"prefix store {shown(url)} does not answer ({error}); every prompt is computed until it does"
    return None


def _answers(client: StoreClient, deadline: float) -> bool:
    try:
        client.contains([PROBE], deadline=deadline).result()
    except StoreError:
        return False
    return True
