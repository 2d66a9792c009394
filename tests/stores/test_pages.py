"""Files in memory with large pages: the same bytes, whether the system gives them or not."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vericache_core.errors import StoreFull, StoreTimeout
from vericache_core.stores import memory, pages
from vericache_core.stores.memory import SharedMemoryBlobs

SHM = Path("/dev/shm")
LARGE = pages.LARGE

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")


def soon() -> float:
    return time.monotonic() + 60


def drawn(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def mapped() -> list[str]:
    """Lines of the table of mappings that name a blob of the tests."""
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "vericache-pages" in line]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemoryBlobs]:
    root = SHM / f"vericache-pages-{os.getpid()}"
    root.mkdir()
    monkeypatch.setattr(memory, "ROOT", root)
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield SharedMemoryBlobs("test", 32 * LARGE)
    assert mapped() == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    for file in sorted(root.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    root.rmdir()


SIZES = [0, 1, 100, LARGE - 17, LARGE - 16, LARGE - 15, LARGE, 2 * LARGE - 16, 3 * LARGE + 12345]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", [True, False])
def test_the_bytes_are_those_that_were_put(
    store: SharedMemoryBlobs, size: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not given:
        monkeypatch.setattr(pages, "_COLLAPSE", 9999)  # no such advice: the system refuses it
    data = drawn(size, size)
    store.put("a", [data[: size // 3], data[size // 3 :]], deadline=soon())
    found = store.get("a", deadline=soon())
    assert found is not None
    assert found.readonly
    assert found.nbytes == size
    assert bytes(found) == data
    assert np.frombuffer(found, np.uint8).ctypes.data % LARGE == 0 or size == 0
    assert given or store.large_pages is (size + 16 < LARGE)


def test_large_pages_are_one_entry_of_the_page_table(store: SharedMemoryBlobs) -> None:
    store.put("a", [drawn(5 * LARGE + 4096)], deadline=soon())
    if not store.large_pages:
        pytest.skip("the system gives no large pages")
    found = store.get("a", deadline=soon())
    assert found is not None
    assert sum(bytes(found[::4096])) > 0
    (facts,) = re.findall(r"\S*vericache-pages\S*\n(?:\w+:.*\n)*", Path("/proc/self/smaps").read_text())
    assert re.search(rf"ShmemPmdMapped:\s+{5 * LARGE // 1024} kB", facts), facts
    assert store.nbytes == 5 * LARGE + 4096 + 16
    held = sum(file.stat().st_blocks * 512 for file in store.folder.rglob("*") if file.is_file())
    assert held <= store.nbytes + 4096, "large pages must not take more memory than the blob"


@pytest.mark.fault("evicted", "while a reader holds it")
def test_a_blob_that_is_evicted_stays_with_its_reader(store: SharedMemoryBlobs) -> None:
    store.most_bytes = 3 * LARGE
    data = drawn(2 * LARGE)
    store.put("a", [data], deadline=soon())
    found = store.get("a", deadline=soon())
    other = SharedMemoryBlobs("test", 3 * LARGE)
    for name in "bcd":
        other.put(name, [drawn(2 * LARGE, ord(name))], deadline=soon())
    assert store.get("a", deadline=soon()) is None
    assert found is not None
    assert bytes(found) == data
    part = found[LARGE : LARGE + 5]
    del found
    assert bytes(part) == data[LARGE : LARGE + 5], "a part keeps the whole"


WRITER = """
import sys, time
from pathlib import Path
from vericache_core.stores import memory
memory.ROOT = Path(sys.argv[1])
store = memory.SharedMemoryBlobs("test")
store.put("a", [bytes([7]) * int(sys.argv[2])], deadline=time.monotonic() + 60)
print("there", flush=True)
held = store.get("a", deadline=time.monotonic() + 60)
time.sleep(600)
"""


@pytest.mark.fault("writer", "while its memory is read")
def test_a_blob_outlives_the_process_that_wrote_it(store: SharedMemoryBlobs) -> None:
    size = 2 * LARGE + 99
    command = [sys.executable, "-c", WRITER, str(memory.ROOT), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        found = store.get("a", deadline=soon())
        writer.send_signal(signal.SIGKILL)
    assert found is not None
    assert bytes(found) == b"\x07" * size
    del found
    again = store.get("a", deadline=soon())
    assert again is not None
    assert again.nbytes == size


@pytest.mark.fault("space", "shared memory")
@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_no_space_for_pages_is_no_space(store: SharedMemoryBlobs, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StoreFull):
            store.put("a", [drawn(2 * LARGE)], deadline=soon())
    assert store.get("a", deadline=soon()) is None
    assert list((store.folder / "tmp").iterdir()) == []
    store.put("a", [drawn(2 * LARGE)], deadline=soon())
    assert store.get("a", deadline=soon()) is not None


@pytest.mark.fault("hang", "pages of shared memory")
def test_pages_that_are_long_in_coming_do_not_outlast_the_deadline(
    store: SharedMemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("b", [b"x"], deadline=soon())  # the folder is there
    real, clock, asked = os.pwrite, time.monotonic, []

    def slow(file: int, data: bytes, at: int) -> int:
        asked.append(at)
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * len(asked))
    with pytest.raises(StoreTimeout):
        store.put("a", [drawn(2 * LARGE)], deadline=clock() + 60)
    assert asked == [0], "went on after the first page had taken too long"
    assert list((store.folder / "tmp").iterdir()) == []


@pytest.mark.fault("refused", "the system, a mapping")
def test_a_mapping_that_is_refused_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    file = os.open(tmp_path / "file", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="ermission"):
            pages.map_aligned(file, 3)
    finally:
        os.close(file)
