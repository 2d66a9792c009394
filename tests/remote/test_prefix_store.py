"""A store over a prefix store: what was computed once survives a restart, apart for each tenant, and faults cost time."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.models import model
from tests.remote.stores import TOKEN, drafter, plain, prompts, same, store, store_engine
from tests.stores_net.servers import RealRedis
from vericache_core.outputs import RequestOutput
from vericache_core.remote.prepare import Preparations
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.compress import Compression
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.stores.disk import DiskBlobs

PARAMS = SamplingParams(max_new_tokens=16)
CHUNK = 128  # the prefix of 150 tokens is a chunk and a tail


def url(folder: Path, more: str = "", base: str | None = None) -> str:
    return f"{base or f'file://{folder}/blobs'}?chunk={CHUNK}&timeout=60{more}"


class Seen:
    """Rows of prefixes that were computed, in order, and how often one was compressed."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.compressed = 0


@contextmanager
def watched() -> Iterator[Seen]:
    seen = Seen()
    shelve, make = Preparations._shelve, Compression._context

    def noted(self: Preparations, coming: Any) -> None:
        seen.rows.append(coming.request.metrics.prefilled)
        shelve(self, coming)

    def made(self: Compression, request: Request, observed: Any) -> Any:
        seen.compressed += 1
        return make(self, request, observed)

    with patch.object(Preparations, "_shelve", noted), patch.object(Compression, "_context", made):
        yield seen


def session(
    folder: Path,
    name: str = "llama",
    tokens: str = TOKEN,
    more: str = "",
    base: str | None = None,
    server: list[StoreServer] | None = None,
    **own: Any,
) -> tuple[list[RequestOutput], Seen]:
    """One life of a store: it starts, serves two requests on one prefix, and ends."""
    chosen = {"compressor": "random", "keep": 0.4, **own}
    engine = store_engine(model(name), prefix_store=url(folder, more, base))
    with (
        watched() as seen,
        store(folder, engine, tokens=tokens) as running,
        drafter(folder, running.port, model(name), **chosen) as ours,
    ):
        got = ours.generate(prompts(2), PARAMS)
        assert engine.reuse is not None
        assert engine.reuse.saver.flush(60)
        if server is not None:
            server.append(running)
    return got, seen


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("llama", {"compressor": "adversarial", "keep": None}),
        ("mistral", {"remote_mode": "fetch"}),
    ],
)
def test_a_store_that_was_restarted_computes_nothing_again(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    expected = plain(prompts(2), PARAMS, model(name))
    first, seen = session(tmp_path, name, **own)
    drafts = own.get("remote_mode") != "fetch"
    assert (seen.rows, seen.compressed) == ([150], 1 if drafts else 0)
    second, seen = session(tmp_path, name, **own)
    assert (seen.rows, seen.compressed) == ([0], 0)
    for got in (first, second):
        same(got, expected)
        assert all(output.metrics.degraded == [] for output in got)
    for before, after in zip(first, second, strict=True):
        assert after.metrics.compressed_kv_bytes == before.metrics.compressed_kv_bytes


@pytest.fixture(params=["shm", "memory", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a store that outlives the process that serves prefixes."""
    if request.param == "redis":
        pytest.importorskip("redis")
        server = RealRedis(tmp_path)
        yield server.url
        server.kill()
    elif request.param == "memory":  # the code of S3 and other object storage
        fsspec = pytest.importorskip("fsspec")
        yield "memory://vericache-of-tests"
        fsspec.filesystem("memory").store.clear()
    else:
        name = f"of-tests-{os.getpid()}"
        yield f"shm://{name}"
        shutil.rmtree(f"/dev/shm/vericache-{os.getuid()}-{name}", ignore_errors=True)


def test_every_backend_keeps_prefixes_over_a_restart(backend: str, tmp_path: Path) -> None:
    expected = plain(prompts(2), PARAMS)
    for computed in ([150], [0]):
        got, seen = session(tmp_path, base=backend)
        same(got, expected)
        assert seen.rows == computed
    assert seen.compressed == 0


def test_full_kv_is_shared_by_compressors_and_a_new_one_only_compresses(tmp_path: Path) -> None:
    session(tmp_path, keep=0.4)
    got, seen = session(tmp_path, keep=0.6)
    same(got, plain(prompts(2), PARAMS))
    assert (seen.rows, seen.compressed) == ([0], 1)


@pytest.mark.fault("tenants", "prefix store behind a verifier")
def test_a_tenant_finds_nothing_of_another(tmp_path: Path) -> None:
    servers: list[StoreServer] = []
    both = f"one:{TOKEN}\ntwo:a-token-of-somebody-else-0123456789"
    session(tmp_path, tokens=f"one:{TOKEN}")
    got, seen = session(tmp_path, tokens=f"two:{TOKEN}", server=servers)
    same(got, plain(prompts(2), PARAMS))
    assert (seen.rows, seen.compressed) == ([150], 1)
    assert seen.rows == [150]
    reuse = servers[0].verifier.engine.reuse
    assert reuse is not None
    counts = reuse.counts
    assert set(counts) == {"", "two"}
    assert (counts["two"].chunks_loaded, counts["two"].misses) == (0, 1)
    _, seen = session(tmp_path, tokens=both)
    assert (seen.rows, seen.compressed) == ([0], 0)
    local = store_engine(prefix_store=url(tmp_path))  # nor does the engine's own work
    with local:
        (output,) = local.generate([prompts(1)[0]], PARAMS, compressor=None)
        assert output.metrics.prefix_tokens_loaded == 0


def spoil(folder: Path, what: str) -> None:
    """Flip a bit near the end of every blob whose name begins with ``what``."""
    for file in (folder / "blobs" / "blobs").iterdir():
        if file.name.startswith(what):
            data = bytearray(file.read_bytes())
            data[-40] ^= 1
            file.write_bytes(data)


@pytest.mark.fault("flip", "blobs behind a verifier")
@pytest.mark.parametrize(("what", "rows", "compressed"), [("full", 150, 0), ("compressed", 0, 1), ("", 150, 1)])
def test_damaged_blobs_cost_time_and_heal(what: str, rows: int, compressed: int, tmp_path: Path) -> None:
    expected = plain(prompts(2), PARAMS)
    session(tmp_path)
    spoil(tmp_path, what)
    got, seen = session(tmp_path)
    same(got, expected)
    assert (seen.rows, seen.compressed) == ([rows], compressed)
    assert all(output.metrics.degraded == [] for output in got)  # the link did its work all the same
    if what != "compressed":
        session(tmp_path)  # a tail that was damaged is found when the chunk before it is there again
    got, seen = session(tmp_path)
    same(got, expected)
    assert (seen.rows, seen.compressed) == ([0], 0)


@pytest.mark.fault("refused", "the prefix store of a verifier")
@pytest.mark.parametrize("method", ["get", "contains", "put"])
def test_a_failing_prefix_store_costs_time(method: str, tmp_path: Path) -> None:
    expected = plain(prompts(2), PARAMS)
    session(tmp_path)

    def broken(*_arguments: Any, **_named: Any) -> Any:
        raise OSError("the disk is on fire")

    with patch.object(DiskBlobs, method, broken):
        got, seen = session(tmp_path)
    same(got, expected)
    assert all(output.metrics.degraded == [] for output in got)
    assert seen.rows == ([0] if method == "put" else [150])
    got, seen = session(tmp_path)
    same(got, expected)
    assert seen.rows == [0]


@pytest.mark.fault("space", "the prefix store of a verifier")
@pytest.mark.parametrize("room", [0, 1000, 40_000])
def test_a_prefix_store_without_space_costs_time(room: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every put ends in "full": by its own limit, or because the disk takes that many bytes of each and no more."""
    expected, real = plain(prompts(2), PARAMS), os.write

    def write(file: int, data: Any) -> int:
        left = room - os.fstat(file).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:left])

    for _ in range(2):
        with patch.object(os, "write", write):
            got, seen = session(tmp_path)
        same(got, expected)
        assert all(output.metrics.degraded == [] for output in got)
        assert seen.rows == [150]
    assert "prefix store is full" in caplog.text
    session(tmp_path)  # there is room again
    got, seen = session(tmp_path)
    same(got, expected)
    assert seen.rows == [0]


def test_without_compressed_kv_in_the_store_a_restart_compresses_again(tmp_path: Path) -> None:
    for compressed in (1, 1):
        got, seen = session(tmp_path, more="&compressed=no")
        assert seen.compressed == compressed
    same(got, plain(prompts(2), PARAMS))
    assert seen.rows == [0]  # the compressor has no use for what prefill shows
