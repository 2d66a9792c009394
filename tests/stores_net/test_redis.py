# mypy: disable-error-code="comparison-overlap"
"""The Redis backend against the real server."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Tally
from tests.stores_net.servers import RealRedis, eventually
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout, UsageError
from vericache_core.stores.blobs import BlobStore
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy

pytest.importorskip("redis")
import redis

from vericache_core.stores.redis import RedisBlobs
from vericache_core.stores.url import open_store


def later() -> float:
    return time.monotonic() + 120


@pytest.fixture
def store(real: RealRedis) -> Iterator[RedisBlobs]:
    store = RedisBlobs(real.url)
    yield store
    store.close()


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) - 32, (1 << 20) - 31, 5_000_000])
def test_round_trip(store: RedisBlobs, size: int) -> None:
    blob = os.urandom(size)
    assert store.get("k", deadline=later()) is None
    store.put("k", [blob[: size // 3], bytearray(blob[size // 3 :])], deadline=later())
    found = store.get("k", deadline=later())
    assert found == blob
    assert found is not None
    assert found.readonly
    assert store.contains(["k", "l"], deadline=later()) == [True, False]
    store.delete("k", deadline=later())
    store.delete("k", deadline=later())
    assert store.get("k", deadline=later()) is None


def test_it_is_a_blob_store(store: RedisBlobs) -> None:
    assert isinstance(store, BlobStore)
    with store.pinned(["k"]):
        assert store.contains([], deadline=later()) == []
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k", deadline=later())


def test_by_url(real: RealRedis) -> None:
    opened = open_store(f"{real.url}?prefix=mine:&chunk=128&timeout=1")
    assert (opened.chunk, opened.timeout) == (128, 1.0)
    opened.blobs.put("k", [b"x"], deadline=later())
    assert opened.blobs.get("k", deadline=later()) == b"x"
    with redis.Redis(port=real.port) as other:
        assert other.keys() == [b"mine:k"]
    opened.blobs.close()
    with pytest.raises(ConfigError, match="unknown option"):
        open_store(f"{real.url}?pickle=yes")
    with pytest.raises(UsageError):
        open_store("redis://localhost:port")


def test_bad_input(store: RedisBlobs, real: RealRedis) -> None:
    with pytest.raises(UsageError):
        store.get("../x", deadline=later())
    with pytest.raises(UsageError):
        RedisBlobs("http://localhost")
    with pytest.raises(StoreTimeout):
        store.get("k", deadline=time.monotonic() - 1)
    small = RedisBlobs(real.url, max_bytes=100)
    with pytest.raises(StoreFull):
        small.put("k", [bytes(101)], deadline=later())
    store.put("k", [bytes(101)], deadline=later())
    with pytest.raises(StoreError, match="no blob of ours"):
        small.get("k", deadline=later())
    small.close()


@pytest.mark.fault("nonsense", "Redis: values of others")
def test_values_of_others_are_not_blobs(store: RedisBlobs, real: RealRedis) -> None:
    with redis.Redis(port=real.port) as other:
        other.set("vericache:k", b"x" * 500)
        other.rpush("vericache:l", "x")
    for key in "kl":
        with pytest.raises(StoreError):
            store.get(key, deadline=later())
    store.put("k", [b"fine"], deadline=later())
    assert store.get("k", deadline=later()) == b"fine"


@pytest.mark.fault("space", "Redis, and a wrong password")
@pytest.mark.parametrize(
    "real", [["--requirepass", "secret", "--maxmemory", "14mb", "--maxmemory-policy", "noeviction"]], indirect=True
)
def test_password_and_full_server(real: RealRedis) -> None:
    wrong, right = (RedisBlobs(real.url.replace("//", f"//:{word}@")) for word in ("guess", "secret"))
    with pytest.raises(StoreError) as caught:
        wrong.get("k", deadline=later())
    assert "guess" not in str(caught.value)
    right.put("k", [bytes(4_000_000)], deadline=later())
    with suppress(StoreFull):
        right.put("l", [bytes(4_000_000)], deadline=later())
        right.put("m", [bytes(4_000_000)], deadline=later())
    with pytest.raises(StoreFull):
        right.put("n", [bytes(4_000_000)], deadline=later())
    found = right.get("k", deadline=later())
    assert found is not None
    wrong.close()
    right.close()


@pytest.mark.parametrize("real", [["--unixsocket", "s"]], indirect=True)
def test_unix_socket(real: RealRedis) -> None:
    store = RedisBlobs(f"unix://{real.folder}/s")
    store.put("k", [b"x"], deadline=later())
    assert store.get("k", deadline=later()) == b"x"
    store.close()


@pytest.mark.fault("stale", "Redis: replaced or deleted while it is read")
def test_replaced_or_deleted_while_it_is_read(store: RedisBlobs, real: RealRedis) -> None:
    """Readers race a writer of two contents and a deleter: each blob is one of the two, whole."""
    blobs = [bytes([n]) * 3_000_000 for n in (1, 2)]
    stop = threading.Event()

    def write() -> None:
        with redis.Redis(port=real.port) as other:
            number = 0
            while not stop.is_set():
                number += 1
                store.put("k", [blobs[number % 2]], deadline=later())
                if number % 3 == 0:
                    other.delete("vericache:k")

    store.put("k", [blobs[0]], deadline=later())
    thread = threading.Thread(target=write)
    thread.start()
    outcomes = {"whole": 0, "miss": 0, "error": 0, "torn": 0}
    gets, limit = 0, later()
    while (gets < 60 or not outcomes["whole"]) and time.monotonic() < limit:
        gets += 1
        try:
            found = store.get("k", deadline=later())
        except StoreError:
            outcomes["error"] += 1
        else:
            outcomes["miss" if found is None else "whole" if found in blobs else "torn"] += 1
    stop.set()
    thread.join()
    assert outcomes["torn"] == 0
    assert outcomes["whole"] > 0


@pytest.mark.fault("redis", "killed and started under load")
def test_killed_and_started_again(store: RedisBlobs, real: RealRedis, tally: Tally) -> None:
    """Calls go on through three restarts; each ends in time, in the right blob, a miss or a ``StoreError``."""
    blob = os.urandom(2_000_000)
    client = StoreClient(store, ClientPolicy(timeout=0.5, failures=3, rest=0.05, backoff=0.01))
    stop = threading.Event()
    outcomes = {"right": 0, "wrong": 0, "miss": 0, "error": 0}

    def use() -> None:
        while not stop.is_set():
            with suppress(StoreError):
                client.put("k", [blob], owned=True).result(20)
            try:
                found = client.get("k").result(20)
            except StoreError:
                outcomes["error"] += 1
                time.sleep(0.01)
            else:
                outcomes["miss" if found is None else "right" if found == blob else "wrong"] += 1

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = outcomes["right"]
        eventually(lambda before=before: outcomes["right"] > before)
        real.kill()
        errors = outcomes["error"]
        eventually(lambda errors=errors: outcomes["error"] > errors)
        real.start()
    before = outcomes["right"]
    eventually(lambda: outcomes["right"] > before)
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    client.close()
    tally.add(3, outcomes["wrong"])


@pytest.mark.fault("closed", "Redis: an idle connection")
def test_an_idle_connection_that_the_server_closed_is_replaced(store: RedisBlobs, real: RealRedis) -> None:
    store.put("k", [b"x"], deadline=later())
    real.kill()
    real.start()
    assert store.get("k", deadline=later()) is None


def test_a_fork_does_not_share_connections(store: RedisBlobs) -> None:
    """Parent and child would read each other's replies; the child makes a connection of its own."""
    blobs = {key: os.urandom(1_500_000) for key in "ab"}
    for key, blob in blobs.items():
        store.put(key, [blob], deadline=later())
    child = os.fork()
    key = "a" if child == 0 else "b"
    right = all(store.get(key, deadline=later()) == blobs[key] for _ in range(20))
    if child == 0:
        store.close()
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert right
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.get("a", deadline=later()) == blobs["a"]


def test_tls(tmp_path: Path) -> None:
    """Encrypted and checked against an authority; a server that another one vouches for is refused."""
    authority, other = certificates(tmp_path)
    server = RealRedis(
        tmp_path,
        "--port",
        "0",
        "--tls-auth-clients",
        "no",
        "--tls-cert-file",
        "server.pem",
        "--tls-key-file",
        "server.key",
        tls=True,
    )
    try:
        url = server.url.replace("redis://127.0.0.1", "rediss://localhost")
        blob = os.urandom(3_000_000)
        store = RedisBlobs(url, ssl_ca_certs=str(authority))
        store.put("k", [blob], deadline=later())
        for _ in range(3):
            assert store.get("k", deadline=later()) == blob
        assert len(store._connections._idle) == 1  # session tickets are no reply that nobody asked for
        store.close()
        stranger = RedisBlobs(url, ssl_ca_certs=str(other))
        with pytest.raises(StoreError, match="certificate"):
            stranger.get("k", deadline=later())
        stranger.close()
    finally:
        server.kill()


def certificates(folder: Path) -> tuple[Path, Path]:
    """Two authorities; the first has signed ``server.pem`` for localhost."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    def made(file: str, subject: str, issuer: str, key: Any, signer: Any, *more: tuple[Any, bool]) -> Path:
        start = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer)).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start)
        builder = builder.not_valid_after(start + dt.timedelta(days=36500))
        for extension, critical in more:
            builder = builder.add_extension(extension, critical)
        path = folder / file
        path.write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    root = (x509.BasicConstraints(ca=True, path_length=None), True)
    local = (x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
    authorities = [made(f"ca{n}.pem", f"ca{n}", f"ca{n}", keys[n], keys[n], root) for n in range(2)]
    made("server.pem", "localhost", "ca0", keys[2], keys[0], local)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(keys[2].private_bytes(*form))
    return authorities[0], authorities[1]
