from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Tally
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout, UsageError
from vericache_core.stores import disk, memory
from vericache_core.stores.blobs import BlobStore
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.memory import SharedMemoryBlobs
from vericache_core.stores.url import open_store

RECORD = 16


def soon() -> float:
    return time.monotonic() + 60


def put(store: BlobStore, key: str, data: bytes) -> None:
    store.put(key, [data[:3], memoryview(data)[3:]], deadline=soon())


def get(store: BlobStore, key: str) -> bytes | None:
    found = store.get(key, deadline=soon())
    return None if found is None else bytes(found)


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name != "lock")


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["mapped", "read", "shm"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskBlobs:
    if request.param == "shm":
        monkeypatch.setattr(memory, "ROOT", tmp_path)
        return SharedMemoryBlobs("test", 10_000)
    return DiskBlobs(tmp_path / "store", 10_000, mapped=request.param == "mapped")


def test_blobs_come_back_whole_and_read_only(store: DiskBlobs) -> None:
    assert isinstance(store, BlobStore)
    assert get(store, "full-1") is None
    put(store, "full-1", b"abcdef")
    put(store, "full-2", b"")
    assert get(store, "full-1") == b"abcdef"
    assert get(store, "full-2") == b""
    found = store.get("full-1", deadline=soon())
    assert found is not None
    assert found.readonly
    assert store.contains(["full-1", "full-3", "full-2"], deadline=soon()) == [True, False, True]
    assert store.nbytes == 6 + 2 * RECORD
    store.delete("full-1", deadline=soon())
    store.delete("full-1", deadline=soon())
    assert get(store, "full-1") is None
    assert bytes(found) == b"abcdef"  # what was handed out stays
    store.close()
    store.close()


def test_a_second_put_of_a_key_is_dropped(store: DiskBlobs) -> None:
    put(store, "a", b"first")
    put(store, "a", b"second")
    assert get(store, "a") == b"first"


@pytest.mark.fault("paths", "in keys, on each kind of folder")
@pytest.mark.parametrize("key", ["../x", "a/b", "a\x00", "", "A", "a" * 129, ".", "..", "a.b", "ключ"])
def test_a_key_cannot_lead_elsewhere(store: DiskBlobs, key: str) -> None:
    with pytest.raises(UsageError, match="is no key"):
        get(store, key)
    with pytest.raises(UsageError, match="is no key"):
        put(store, key, b"x")
    with pytest.raises(UsageError, match="is no key"):
        store.delete(key, deadline=soon())
    with pytest.raises(UsageError, match="is no key"):
        store.contains(["a", key], deadline=soon())
    assert not store.folder.exists() or not files(store.folder)


def test_only_the_owner_can_read(store: DiskBlobs) -> None:
    put(store, "a", b"secret")
    assert store.folder.stat().st_mode & 0o077 == 0
    assert (store.folder / "blobs/a").stat().st_mode & 0o077 == 0


@pytest.mark.fault("paths", "links, pipes and folders in the place of blobs")
def test_links_pipes_and_folders_do_not_pass_for_blobs(store: DiskBlobs, tmp_path: Path) -> None:
    put(store, "a", b"abc")
    secret = tmp_path / "secret"
    secret.write_bytes((store.folder / "blobs/a").read_bytes())
    (store.folder / "blobs/link").symlink_to(secret)
    os.mkfifo(store.folder / "blobs/pipe")
    (store.folder / "blobs/folder").mkdir()
    for key in ("link", "pipe", "folder"):
        with pytest.raises(StoreError):
            get(store, key)


@pytest.mark.fault("length", "a file that was cut or added to")
def test_a_file_that_was_cut_or_added_to_is_an_error(store: DiskBlobs) -> None:
    put(store, "a", b"x" * 100)
    path = store.folder / "blobs/a"
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 10), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="damaged"):
            get(store, "a")
        assert get(store, "a") is None
    path.write_bytes(whole + b"x")
    with pytest.raises(StoreError, match="damaged"):
        get(store, "a")
    put(store, "a", b"good")
    assert get(store, "a") == b"good"


def test_the_least_recently_used_go_first(store: DiskBlobs) -> None:
    for name in "abcdef":
        put(store, name, bytes(1500))
        os.utime(store.folder / "blobs" / name, ns=(0, ord(name)))
    assert get(store, "a") is not None  # now the most recently used one
    put(store, "g", bytes(1500))
    assert store.contains(list("abcdefg"), deadline=soon()) == [True, False, True, True, True, True, True]
    assert store.nbytes <= 10_000


@pytest.mark.fault("space", "a store whose blobs are all pinned")
def test_pinned_blobs_stay_and_a_full_store_says_so(store: DiskBlobs) -> None:
    for name in "abcdef":
        put(store, name, bytes(1500))
    with store.pinned(list("abcde")), store.pinned(["a"]):
        put(store, "g", bytes(1500))
        assert store.contains(list("abcdefg"), deadline=soon()) == [True] * 5 + [False, True]
        with store.pinned(["g"]), pytest.raises(StoreFull, match="pinned"):
            put(store, "h", bytes(1500))
    with pytest.raises(StoreFull, match="does not fit"):
        put(store, "i", bytes(10_000))
    assert store.nbytes <= 10_000
    assert all(name.startswith("blobs/") for name in files(store.folder))
    put(store, "h", bytes(1500))
    assert not store._pins


def test_what_was_pinned_goes_from_its_end(store: DiskBlobs) -> None:
    for name in "abcdef":
        put(store, name, bytes(1500))
    with store.pinned(["d", "a", "c", "gone"]):
        for name in ("d", "a", "c"):
            get(store, name)
    for name in "xyz":
        put(store, name, bytes(1500))
    assert store.contains(list("abcdef"), deadline=soon()) == [True, False, True, True, False, False]
    put(store, "w", bytes(1500))
    assert store.contains(list("acd"), deadline=soon()) == [True, False, True]
    put(store, "v", bytes(1500))
    assert store.contains(list("acd"), deadline=soon()) == [False, False, True]


def test_pins_end_with_an_exception(store: DiskBlobs) -> None:
    with pytest.raises(KeyError), store.pinned(["a"]):
        raise KeyError
    assert not store._pins


@pytest.mark.fault("hang", "a folder, past the deadline")
def test_past_its_deadline_nothing_is_done(store: DiskBlobs) -> None:
    put(store, "a", b"abc")
    late = time.monotonic() - 1
    for call in (
        lambda: store.get("a", deadline=late),
        lambda: store.put("b", [b"x"], deadline=late),
        lambda: store.contains(["a"], deadline=late),
        lambda: store.delete("a", deadline=late),
    ):
        with pytest.raises(StoreTimeout):
            call()
    assert files(store.folder) == ["blobs/a"]


@pytest.mark.fault("hang", "the lock of a folder")
def test_a_lock_that_is_held_ends_at_the_deadline(store: DiskBlobs) -> None:
    put(store, "a", b"abc")
    with (store.folder / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeout):
            store.put("b", [b"x"], deadline=time.monotonic() + 0.05)
        assert get(store, "a") == b"abc"  # readers do not wait for writers
    assert files(store.folder) == ["blobs/a"]
    put(store, "b", b"x")


@pytest.mark.fault("paths", "shared memory of somebody else")
def test_shared_memory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    store = SharedMemoryBlobs("test")
    store.folder.mkdir(mode=0o700)
    store.folder.chmod(0o777)
    with pytest.raises(StoreError, match="others may write"):
        put(store, "a", b"x")
    store.folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    store.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="somebody else"):
        put(store, "a", b"x")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "x" * 65])
def test_shared_memory_has_a_plain_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        SharedMemoryBlobs(name)


def test_real_shared_memory_is_left_clean() -> None:
    store = SharedMemoryBlobs(f"test-{os.getpid()}", 10_000)
    try:
        put(store, "a", b"abc")
        assert get(SharedMemoryBlobs(f"test-{os.getpid()}"), "a") == b"abc"
    finally:
        for file in sorted(store.folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        store.folder.rmdir()


# -- disk full, no permission ------------------------------------------------------------------------


class FullDisk:
    """``os.write`` of a disk with ``room`` bytes left: first a short write, then ENOSPC."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self.code, self.real = room, code, os.write

    def __call__(self, file: int, data: memoryview) -> int:
        if self.room <= 0:
            raise OSError(self.code, os.strerror(self.code))
        done = self.real(file, data[: self.room])
        self.room -= done
        return done


@pytest.mark.fault("full", "or over quota, after any byte")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1, 3, 500, 999, 1000, 1015])
def test_a_full_disk_leaves_nothing_behind_and_heals(
    store: DiskBlobs, monkeypatch: pytest.MonkeyPatch, room: int, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(room, code))
        with pytest.raises(StoreFull):
            put(store, "a", bytes(1000))
    assert files(store.folder) == []
    put(store, "a", bytes(1000))
    assert get(store, "a") == bytes(1000)


@pytest.mark.fault("space", "a folder: old blobs make room")
def test_a_full_disk_makes_old_blobs_go(store: DiskBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "old", bytes(1000))
    disk_full = FullDisk(10)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        disk_full.room += path.lstat().st_size if path.exists() else 0
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "write", disk_full)
    monkeypatch.setattr(Path, "unlink", unlink)
    put(store, "new", bytes(900))
    assert files(store.folder) == ["blobs/new"]


@pytest.mark.fault("space", "a real file system of 1 MiB")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_file_system(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        store = DiskBlobs(mounted / "store", None, durable=False)
        (mounted / "other").write_bytes(bytes(700_000))
        with pytest.raises(StoreFull):
            put(store, "a", bytes(600_000))
        assert files(mounted / "store") == []
        put(store, "b", bytes(100_000))
        (mounted / "other").unlink()
        put(store, "a", bytes(600_000))
        put(store, "c", bytes(600_000))  # makes a and b go
        assert get(store, "c") == bytes(600_000)
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root may read and write everything, so these tests run as somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.fault("permission", "a folder, at each call")
@pytest.mark.usefixtures("unprivileged")
def test_a_folder_without_permission_is_an_error_of_each_call() -> None:
    store = DiskBlobs(Path("/proc/vericache"))
    for _ in range(2):
        with pytest.raises(StoreError, match="could not be written"):
            put(store, "a", b"x")
    assert get(store, "a") is None


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.fault("permission", "a folder that may only be read")
def test_a_read_only_folder_serves_what_it_has(open_folder: Path) -> None:
    store = DiskBlobs(open_folder / "store", 10_000)
    put(store, "a", b"abc")
    for file in [store.folder, *store.folder.rglob("*")]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    seen = DiskBlobs(store.folder, 10_000)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        assert get(seen, "a") == b"abc"
        assert seen.contains(["a", "b"], deadline=soon()) == [True, False]
        with pytest.raises(StoreError, match="could not be written"):
            put(seen, "b", b"x")
        with pytest.raises(StoreError, match="could not be removed"):
            seen.delete("a", deadline=soon())
    finally:
        if root:
            os.seteuid(0)
        for folder in [store.folder, *(file for file in store.folder.rglob("*") if file.is_dir())]:
            folder.chmod(0o700)


def test_a_folder_that_vanishes_is_made_again(store: DiskBlobs) -> None:
    put(store, "a", b"abc")
    for file in sorted(store.folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    store.folder.rmdir()
    assert get(store, "a") is None
    assert store.contains(["a"], deadline=soon()) == [False]
    put(store, "a", b"abc")
    assert get(store, "a") == b"abc"


# -- crashes and company -----------------------------------------------------------------------------

WRITER = """
import os, signal, sys, time
from pathlib import Path
from vericache_core.stores.disk import DiskBlobs
step, point = 0, int(sys.argv[2])
def dying(call):
    def run(*args, **kwargs):
        global step
        step += 1
        if step == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return run
real = os.write
def write(file, data):
    return real(file, data[:100])          # many small writes, and a death between any two
os.write, os.fsync, os.rename = dying(write), dying(os.fsync), dying(os.rename)
Path.rename = dying(Path.rename)
store = DiskBlobs(Path(sys.argv[1]), 10_000)
for number in range(1000):
    store.put(f"new-{number}", [bytes([number % 256]) * 999], deadline=time.monotonic() + 60)
"""


@pytest.mark.fault("writer", "blobs of a folder")
def test_a_writer_killed_at_twenty_points_costs_at_most_its_last_blob(tmp_path: Path, tally: Tally) -> None:
    store = DiskBlobs(tmp_path / "store", 10_000)
    put(store, "old", b"kept")
    points = random.Random(5).sample(range(1, 60), 20)
    for point in points:
        wrong = 0
        died = subprocess.run([sys.executable, "-c", WRITER, str(store.folder), str(point)], check=False)
        assert died.returncode == -signal.SIGKILL
        restarted = DiskBlobs(store.folder, 10_000)
        put(restarted, "probe", b"x")  # the first write sweeps
        restarted.delete("probe", deadline=soon())
        assert all(name.startswith("blobs/") for name in files(store.folder))
        for name in files(store.folder):
            key = name.removeprefix("blobs/")
            data = get(restarted, key)
            assert data is not None
            wrong += data != (b"kept" if key == "old" else bytes([int(key.removeprefix("new-")) % 256]) * 999)
            if key != "old":
                restarted.delete(key, deadline=soon())
        assert get(restarted, "old") == b"kept"
        tally.add(wrong=wrong)
    assert tally.cases == 20


def test_the_files_of_a_living_writer_are_not_swept(store: DiskBlobs) -> None:
    put(store, "a", b"abc")
    alive, dead = store.folder / "tmp/1-1", store.folder / "tmp/1-2"
    with alive.open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        dead.write_bytes(b"half")
        restarted = DiskBlobs(store.folder, 10_000)
        put(restarted, "b", b"abc")
        assert alive.exists()
        assert not dead.exists()


def test_a_file_that_waits_for_its_name_is_not_swept(store: DiskBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the folder between the last byte of a put and its rename."""
    put(store, "old", b"abc")
    real = store._make_room

    def make_room(size: int, least: int = 0) -> int:
        for left in store._aside.iterdir():
            disk._remove_if_dead(left)
        return real(size, least)

    monkeypatch.setattr(store, "_make_room", make_room)
    put(store, "a", b"abc")
    assert get(store, "a") == b"abc"


def test_a_store_that_is_over_its_budget_shrinks_when_it_is_opened(tmp_path: Path) -> None:
    big = DiskBlobs(tmp_path / "store")
    for name in "abcdef":
        put(big, name, bytes(1000))
    small = DiskBlobs(tmp_path / "store", 2500)
    put(small, "g", bytes(10))
    assert small.nbytes <= 2500
    assert get(small, "g") is not None


def test_threads_and_outsiders_cannot_confuse_it(store: DiskBlobs) -> None:
    """Four threads put, get and delete, somebody removes files at random: no exception, no wrong byte, in budget."""
    store.most_bytes = 3 * (1000 + RECORD)
    failures: list[BaseException] = []
    before = open_files()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(150):
                number = draw.randrange(8)
                action = draw.randrange(5)
                if action < 2:
                    put(store, f"k{number}", bytes([number]) * 1000)
                elif action == 2:
                    assert get(store, f"k{number}") in {None, bytes([number]) * 1000}
                elif action == 3:
                    store.delete(f"k{number}", deadline=soon())
                else:
                    with contextlib.suppress(OSError):
                        (store.folder / f"blobs/k{number}").unlink()
        except BaseException as error:  # noqa: BLE001 (the main thread looks at it)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.nbytes <= store.most_bytes
    assert all(name.startswith("blobs/") for name in files(store.folder))
    assert open_files() <= before


SHARER = """
import sys, time
from pathlib import Path
from vericache_core.stores.disk import DiskBlobs
store = DiskBlobs(Path(sys.argv[1]), 5000)
for number in range(60):
    key = f"k{number % 12}"
    store.put(key, [bytes([number % 12]) * 1000], deadline=time.monotonic() + 60)
    found = store.get(key, deadline=time.monotonic() + 60)
    assert found is None or bytes(found) == bytes([number % 12]) * 1000
    assert store.nbytes <= 5000, store.nbytes
"""


def test_processes_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    others = [subprocess.Popen([sys.executable, "-c", SHARER, str(tmp_path / "store")]) for _ in range(3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert all(name.startswith("blobs/") for name in files(tmp_path / "store"))


def test_a_blob_appears_only_when_it_is_whole(store: DiskBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks between any two writes of a put sees nothing."""
    real, seen = os.write, []

    def write(file: int, data: Any) -> int:
        seen.append(get(store, "a"))
        return real(file, data[:7])

    monkeypatch.setattr(os, "write", write)
    put(store, "a", bytes(100))
    assert len(seen) > 10
    assert set(seen) == {None}


def test_durability_comes_before_visibility(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(file: int) -> None:
        order.append("sync")
        real_sync(file)

    def rename(path: Path, to: Path) -> Path:
        order.append("rename")
        return real_rename(path, to)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    put(DiskBlobs(tmp_path / "store"), "a", b"abc")
    assert order == ["sync", "rename", "sync"]


def test_a_mapping_costs_no_copy_and_no_file_stays_open(tmp_path: Path) -> None:
    store = DiskBlobs(tmp_path / "store")
    put(store, "a", bytes(1 << 20))
    before = open_files()
    held = [store.get("a", deadline=soon()) for _ in range(8)]
    assert all(isinstance(view, memoryview) and isinstance(view.obj, mmap.mmap) for view in held)
    del held
    assert open_files() == before


def test_urls_name_stores(tmp_path: Path) -> None:
    opened = open_store(f"file://{tmp_path}/a%20b?bytes=2KiB&chunk=384&timeout=0.5&map=no")
    assert (opened.chunk, opened.timeout) == (384, 0.5)
    assert isinstance(opened.blobs, DiskBlobs)
    assert (opened.blobs.folder, opened.blobs.most_bytes) == (tmp_path / "a b", 2048)
    assert not opened.blobs.folder.exists()
    shared = open_store("shm://test?bytes=1.5GB")
    assert isinstance(shared.blobs, SharedMemoryBlobs)
    assert (shared.blobs.most_bytes, shared.chunk, shared.timeout) == (1_500_000_000, 256, 2.0)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x", "unknown scheme 'ftp'"),
        ("/var/cache", "unknown scheme ''"),
        ("file://host/x", "absolute folder"),
        ("file:///", "absolute folder"),
        ("file:///x?size=3", "unknown option 'size'"),
        ("file:///x?bytes=3&bytes=4", "given twice"),
        ("file:///x?bytes", "NAME=VALUE"),
        ("file:///x?bytes=0", "expected a size"),
        ("file:///x?bytes=-3GB", "expected a size"),
        ("file:///x?bytes=ten", "expected a size"),
        ("file:///x?chunk=100", "multiple of 128"),
        ("file:///x?chunk=0", "multiple of 128"),
        ("file:///x?timeout=0", "more than 0"),
        ("file:///x?timeout=inf", "more than 0"),
        ("file:///x?timeout=nan", "more than 0"),
        ("file:///x?map=perhaps", "yes or no"),
        ("shm://x/y", "one word"),
        ("shm://", "is no name"),
    ],
)
def test_bad_urls_are_named(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("ftp://me:secret@host/x")
    assert "secret" not in str(caught.value)
