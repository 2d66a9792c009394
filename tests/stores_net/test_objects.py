# mypy: disable-error-code="comparison-overlap"
"""The fsspec backend: in memory, in a folder, and on moto's S3 server."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.stores_net.servers import eventually
from vericache_core.errors import ConfigError, MissingDependencyError, StoreError, StoreFull, StoreTimeout, UsageError
from vericache_core.stores.blobs import BlobStore

pytest.importorskip("fsspec")
import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from vericache_core.stores.objects import ObjectBlobs
from vericache_core.stores.url import open_store


def later() -> float:
    return time.monotonic() + 120


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with a bucket named ``blobs``."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[s3,server] is not installed")
    with pytest.MonkeyPatch.context() as env:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            env.setenv(name, "test")
        env.setenv("AWS_DEFAULT_REGION", "us-east-1")
        running = server.ThreadedMotoServer(port=0)
        running.start()
        host, port = running.get_host_and_port()
        address = f"http://{host}:{port}"
        import boto3

        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="blobs")
        client.close()
        yield address
        running.stop()


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """What libraries open once for the whole process is no leak of a test."""
    if not (_has("s3fs") and _has("moto")):
        return
    store = ObjectBlobs("s3://blobs/warm", endpoint_url=request.getfixturevalue("s3"))
    store.put("k", [b"x"], deadline=later())
    store.close()
    del store
    gc.collect()


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectBlobs]:
    if request.param == "memory":
        made = ObjectBlobs("memory://blobs")
    elif request.param == "file":
        made = ObjectBlobs(f"file://{tmp_path}/blobs")
    else:
        made = ObjectBlobs(f"s3://blobs/{tmp_path.name}", endpoint_url=request.getfixturevalue("s3"))
    yield made
    made.close()
    del made
    gc.collect()
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("size", [0, 1, 6_000_000])
def test_round_trip(store: ObjectBlobs, size: int) -> None:
    blob = os.urandom(size)
    assert store.get("k", deadline=later()) is None
    store.put("k", [blob[: size // 3], memoryview(blob)[size // 3 :]], deadline=later())
    found = store.get("k", deadline=later())
    assert found is not None
    assert found == blob
    assert found.readonly
    assert store.contains(["k", "l"], deadline=later()) == [True, False]
    store.put("k", [b"again"], deadline=later())
    assert store.get("k", deadline=later()) == b"again"
    store.delete("k", deadline=later())
    store.delete("k", deadline=later())
    assert store.contains(["k"], deadline=later()) == [False]


def test_it_is_a_blob_store(store: ObjectBlobs) -> None:
    assert isinstance(store, BlobStore)
    with store.pinned(["k"]):
        assert store.contains([], deadline=later()) == []
    with pytest.raises(UsageError):
        store.get("../k", deadline=later())
    with pytest.raises(StoreTimeout):
        store.get("k", deadline=time.monotonic() - 1)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k", deadline=later())


@pytest.mark.fault("headers", "an object that is too large")
def test_too_large_is_refused_before_it_is_read_or_written(store: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", [bytes(1000)], deadline=later())
    store._max_bytes = 999
    reads: list[str] = []
    call = store._call

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        reads.append(name)
        return call(name, *args, **kwargs)

    monkeypatch.setattr(store, "_call", watched)
    with pytest.raises(StoreError, match="1000 bytes"):
        store.get("k", deadline=later())
    with pytest.raises(StoreFull):
        store.put("l", [bytes(1000)], deadline=later())
    assert reads == ["info"]


@pytest.mark.fault("space", "a folder of fsspec")
@pytest.mark.parametrize("step", ["pipe_file", "mv"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EACCES, StoreError), (errno.EIO, StoreError)])
def test_a_put_into_a_folder_that_fails_leaves_nothing(
    tmp_path: Path, step: str, number: int, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectBlobs(f"file://{tmp_path}")
    whole = LocalFileSystem.pipe_file

    def fails(self: LocalFileSystem, path: str, value: Any = None, *_args: Any, **_kwargs: Any) -> None:
        if step == "pipe_file":
            whole(self, path, value[: len(value) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalFileSystem, step, fails)
    with pytest.raises(StoreError) as caught:
        store.put("k", [bytes(1000)], deadline=later())
    assert type(caught.value) is kind
    assert list(tmp_path.iterdir()) == []
    assert store.get("k", deadline=later()) is None


def test_readers_in_a_folder_see_whole_blobs_only(tmp_path: Path) -> None:
    store = ObjectBlobs(f"file://{tmp_path}")
    blobs = [bytes([n]) * 2_000_000 for n in (1, 2)]
    done = threading.Event()

    def write() -> None:
        for number in range(30):
            store.put("k", [blobs[number % 2]], deadline=later())
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    torn = seen = 0
    while not done.is_set():
        found = store.get("k", deadline=later())
        seen += found is not None
        torn += found is not None and found not in blobs
    thread.join()
    assert (torn, seen > 0) == (0, True)


@pytest.mark.fault("settings", "a bucket that is not there")
def test_no_such_bucket(s3: str) -> None:
    store = ObjectBlobs("s3://other", endpoint_url=s3)
    with pytest.raises(StoreError, match="no such bucket"):
        store.put("k", [b"x"], deadline=later())
    store.close()


def test_s3_by_url(s3: str) -> None:
    opened = open_store(f"s3://blobs/here?endpoint_url={quote(s3, safe='')}&region=us-east-1&timeout=60")
    opened.blobs.put("k", [b"x"], deadline=later())
    assert opened.blobs.get("k", deadline=later()) == b"x"
    opened.blobs.close()


@pytest.mark.fault("hang", "S3")
def test_s3_that_accepts_and_never_answers(s3: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = ObjectBlobs("s3://blobs", endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreTimeout):
            store.get("k", deadline=time.monotonic() + 0.3)
        with pytest.raises(StoreTimeout):
            store.put("k", [b"x"], deadline=time.monotonic() + 0.3)
        with pytest.raises(StoreTimeout):
            store.contains(["k"], deadline=time.monotonic() + 0.3)
        store.close()
        del store
        gc.collect()


@pytest.mark.fault("refused", "S3")
def test_s3_that_refuses(s3: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    store = ObjectBlobs("s3://blobs", endpoint_url=address)
    with pytest.raises(StoreError):
        store.get("k", deadline=time.monotonic() + 0.5)
    store.close()


@pytest.mark.fault("length", "S3")
@pytest.mark.parametrize("body", [b"", b"x" * 50, b"x" * 150])
def test_s3_whose_answer_has_the_wrong_length(s3: str, body: bytes) -> None:
    """HEAD says 100 bytes; the object that comes has fewer or more, or the connection ends early."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                sock, _ = listener.accept()
                with sock:
                    request = sock.recv(65536)
                    head = (
                        b'HTTP/1.1 200 OK\r\nETag: "x"\r\nConnection: close\r\nLast-Modified: Sun, 29 Nov 2026 00:00:00 GMT\r\n'
                    )
                    size = 100 if request.startswith(b"HEAD") or not body else len(body)
                    sock.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
                    if request.startswith(b"GET"):
                        sock.sendall(body)

        thread = threading.Thread(target=serve)
        thread.start()
        address = listener.getsockname()
        store = ObjectBlobs("s3://blobs", endpoint_url=f"http://127.0.0.1:{address[1]}")
        with pytest.raises(StoreError):
            store.get("k", deadline=time.monotonic() + 2)
        store.close()
        stop.set()
        socket.create_connection(address).close()
        thread.join()
        del store
        gc.collect()


def test_a_folder_of_that_name_is_no_blob(store: ObjectBlobs) -> None:
    if store._fs.async_impl:
        store._fs.pipe_file(store._path("k") + "/x", b"y")
    else:
        store._fs.makedirs(store._path("k"))
    assert store.get("k", deadline=later()) is None


@pytest.mark.fault("settings", "a file system that nobody checked")
def test_file_systems_nobody_checked_are_refused() -> None:
    class Unchecked(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
        protocol = "unchecked"

    fsspec.register_implementation("unchecked", Unchecked, clobber=True)
    for url in ("simplecache::file:///tmp/x", "unchecked://x"):
        with pytest.raises(ConfigError, match="publish"):
            ObjectBlobs(url)
    with pytest.raises(ConfigError, match="no address"):
        ObjectBlobs("nonsense://x")


@pytest.mark.fault("settings", "a package that is missing")
def test_a_missing_package_is_named() -> None:
    if _has("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(MissingDependencyError, match="gcsfs"):
        ObjectBlobs("gs://bucket")


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def test_handles_come_back(s3: str) -> None:
    def once() -> None:
        store = ObjectBlobs("s3://blobs", endpoint_url=s3)
        store.put("k", [b"x"], deadline=later())
        store.close()
        del store
        gc.collect()

    once()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        once()
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
