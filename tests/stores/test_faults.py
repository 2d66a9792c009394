"""The fault table: whatever happens to a local store, no wrong row is served, nothing hangs and nothing is left behind.

Every case ends with a cache of which each row is compared with a prefill, and with the store healed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import json
import os
import pickle
import random
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Tally
from tests.stores.support import CHUNK, IDENTITY, Model, layers, make_store, tokens
from vericache_core.errors import StoreError
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.prefix import Loaded, PrefixStore

CHUNKS = 7
MODEL = Model(layers(2))
IDS = tokens(CHUNKS * CHUNK)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A store with seven chunks; no file may stay open and none may be left aside."""
    store = make_store(MODEL, tmp_path / "store")
    MODEL.prefill(MODEL.cache(), IDS, store)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield tmp_path / "store"
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert list((tmp_path / "store/tmp").iterdir()) == []


def blob(folder: Path, number: int) -> Path:
    return folder / "blobs" / make_store(MODEL, folder).keys(IDS)[number]


def load(folder: Path, store: PrefixStore | None = None) -> tuple[Loaded, int]:
    """Load, compute the rest, and count wrong rows before and after."""
    full = MODEL.cache()
    loaded = (store or make_store(MODEL, folder)).load(IDS, full, most=len(IDS) - 1)
    assert full.tokens == loaded.tokens
    wrong = MODEL.wrong_rows(full, IDS)
    MODEL.prefill(full, IDS)
    return loaded, wrong + MODEL.wrong_rows(full, IDS)


def header_fields(data: bytes) -> dict[str, range]:
    """Where each field of a header lies in a blob, nested ones by path; magic, length and checksum of the header too."""
    (length,) = struct.unpack_from("<I", data, 8)
    text = data[44 : 44 + length].decode()
    found = {"magic": range(8), "length": range(8, 12), "checksum": range(12, 44)}

    def walk(value: Any, path: str, start: int) -> None:
        if not isinstance(value, dict):
            return
        for name, inner in value.items():
            spelled = f'"{name}":' + json.dumps(inner, separators=(",", ":"), sort_keys=True)
            at = text.index(spelled, start)
            found[f"{path}{name}"] = range(44 + at, 44 + at + len(spelled))
            walk(inner, f"{path}{name}.", at)

    walk(json.loads(text), "", 0)
    return found


def spoiled_by(folder: Path, number: int, spoil: Callable[[bytes], bytes]) -> tuple[Loaded, int]:
    """Load with chunk ``number`` spoiled; the blob is whole again afterwards."""
    file = blob(folder, number)
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    try:
        return load(folder)
    finally:
        assert not file.exists() or file.read_bytes() == whole, "a damaged blob was left in its place"
        file.write_bytes(whole)


def flipped(at: int, bit: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        return bytes(changed)

    return flip


@pytest.mark.fault("header", "blob of full KV")
def test_a_flip_in_every_header_field(folder: Path, tally: Tally) -> None:
    data = blob(folder, 2).read_bytes()
    fields = header_fields(data)
    assert {"magic", "length", "checksum", "key", "role", "codec.id", "identity.dtype", "payload.sha256"} < fields.keys()
    draw = random.Random(1)
    for places in fields.values():
        for at in sorted(draw.sample(places, min(4, len(places)))):
            loaded, bad = spoiled_by(folder, 2, flipped(at, draw.randrange(8)))
            assert (loaded.tokens, len(loaded.faults)) == (2 * CHUNK, 1)
            tally.add(wrong=bad)
    assert len(fields) >= 20


@pytest.mark.fault("flip", "at random, in any of 7 chunks")
def test_random_flips_in_the_payload(folder: Path, tally: Tally) -> None:
    data = blob(folder, 0).read_bytes()
    start = max(places.stop for places in header_fields(data).values())
    draw = random.Random(2)
    for _ in range(300):
        number = draw.randrange(CHUNKS)
        loaded, bad = spoiled_by(folder, number, flipped(draw.randrange(start, len(data)), draw.randrange(8)))
        assert (loaded.tokens, len(loaded.faults)) == (number * CHUNK, 1)
        tally.add(wrong=bad)
    assert load(folder)[0].tokens == len(IDS) - 1


@pytest.mark.fault("truncated", "each of 7 chunks; junk at the end")
def test_truncation_at_each_tenth_and_junk_at_the_end(folder: Path, tally: Tally) -> None:
    for number, tenth in itertools.product(range(CHUNKS), range(10)):
        loaded, bad = spoiled_by(folder, number, lambda data: data[: len(data) * tenth // 10])  # noqa: B023 (called at once)
        assert (loaded.tokens, len(loaded.faults)) == (number * CHUNK, 1)
        tally.add(wrong=bad)
    loaded, bad = spoiled_by(folder, 3, lambda data: data + b"junk")
    tally.add(wrong=bad)
    assert loaded.tokens == 3 * CHUNK


class Canary:
    """Sings when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "executed")


@pytest.mark.fault("pickle", "in the place of any of 7 chunks, any protocol")
def test_a_pickle_in_the_place_of_any_blob(folder: Path, tmp_path: Path, tally: Tally) -> None:
    for number, protocol in itertools.product(range(CHUNKS), range(pickle.HIGHEST_PROTOCOL + 1)):
        evil = pickle.dumps(Canary(tmp_path / "canary"), protocol)
        loaded, bad = spoiled_by(folder, number, lambda _data: evil)  # noqa: B023 (called at once)
        assert (loaded.tokens, len(loaded.faults)) == (number * CHUNK, 1)
        tally.add(wrong=bad)
    assert not (tmp_path / "canary").exists()
    pickle.loads(evil)  # the canary does sing
    assert (tmp_path / "canary").read_text() == "executed"


@pytest.mark.fault("swapped", "every pair of 7 chunks")
def test_swapped_entries(folder: Path, tally: Tally) -> None:
    for one, other in itertools.combinations(range(CHUNKS), 2):
        first, second = blob(folder, one), blob(folder, other)
        datas = first.read_bytes(), second.read_bytes()
        first.write_bytes(datas[1])
        second.write_bytes(datas[0])
        loaded, bad = load(folder)
        assert (loaded.tokens, len(loaded.faults)) == (one * CHUNK, 1)
        assert "key" in loaded.faults[0]
        tally.add(wrong=bad)
        first.write_bytes(datas[0])
        second.write_bytes(datas[1])


class Between(DiskBlobs):
    """Something happens between lookup and load."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def contains(self, keys: Any, *, deadline: float) -> list[bool]:
        found = super().contains(keys, deadline=deadline)
        self.happens()
        return found


def evict(folder: Path, numbers: Sequence[int]) -> None:
    for number in numbers:
        blob(folder, number).unlink()


@pytest.mark.fault("evicted", "a folder")
def test_eviction_between_lookup_and_load_of_every_subset(folder: Path, tally: Tally) -> None:
    blobs = Between(folder, durable=False)
    store = PrefixStore(blobs, IDENTITY, MODEL.layers, CHUNK)
    datas = [blob(folder, number).read_bytes() for number in range(CHUNKS)]
    for gone in itertools.chain.from_iterable(itertools.combinations(range(CHUNKS), n) for n in range(CHUNKS + 1)):
        blobs.happens = functools.partial(evict, folder, gone)
        loaded, bad = load(folder, store)
        first = min(gone, default=CHUNKS)
        assert (loaded.tokens, loaded.faults) == (min(first * CHUNK, len(IDS) - 1), ())  # what is evicted is no fault
        assert not gone or loaded.reason == f"chunk {first} was evicted meanwhile"
        for number in gone:
            blob(folder, number).write_bytes(datas[number])
        tally.add(wrong=bad)
    assert tally.cases == 128


@pytest.mark.fault("swapped", "another prompt's chunks under these names")
def test_everything_is_replaced_between_lookup_and_load(folder: Path) -> None:
    """The folder is emptied and filled with another prompt's chunks under these names."""
    blobs = Between(folder, durable=False)
    other = tokens(CHUNKS * CHUNK, seed=8)
    make_store(MODEL, folder / "other")
    MODEL.prefill(MODEL.cache(), other, make_store(MODEL, folder / "other"))
    theirs = make_store(MODEL, folder / "other").keys(other)

    def swap() -> None:
        for number, key in enumerate(theirs):
            blob(folder, number).write_bytes((folder / "other/blobs" / key).read_bytes())

    blobs.happens = swap
    loaded, wrong = load(folder, PrefixStore(blobs, IDENTITY, MODEL.layers, CHUNK))
    assert (loaded.tokens, len(loaded.faults), wrong) == (0, 1, 0)


@pytest.mark.fault("stale", "claims chunks that are gone, or lacks all")
def test_a_stale_index(folder: Path, tally: Tally) -> None:
    """The store claims chunks that it does not have, or none of those that it has."""
    store = make_store(MODEL, folder)
    for number in range(CHUNKS):
        kept = blob(folder, number).read_bytes()
        blob(folder, number).unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.blobs, "contains", lambda keys, *, deadline: [True] * len(keys))
            loaded, bad = load(folder, store)
        assert (loaded.tokens, loaded.faults) == (number * CHUNK, ())
        blob(folder, number).write_bytes(kept)
        tally.add(wrong=bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.blobs, "contains", lambda keys, *, deadline: [False] * len(keys))
        loaded, bad = load(folder, store)
    assert loaded.tokens == 0
    tally.add(wrong=bad)


@pytest.mark.fault("writer", "rows of a prefix")
def test_a_writer_killed_at_twenty_points(folder: Path, tally: Tally) -> None:
    """Fork, write two chunks in pieces of a hundred bytes, and die at a random system call."""
    store, full = make_store(MODEL, folder), MODEL.cache()
    MODEL.prefill(full, IDS)
    chunks = [store.capture(IDS, full, number) for number in (3, 4)]
    steps = count_steps(folder, store, chunks)
    for point in random.Random(4).sample(range(1, steps + 1), 20):
        for number in (3, 4):
            blob(folder, number).unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child only writes files and dies
            child = os.fork()
        if child == 0:
            die_at(point)
            for chunk in chunks:
                store.put(chunk)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        loaded, bad = load(folder)
        assert loaded.tokens in {3 * CHUNK, 4 * CHUNK, len(IDS) - 1}
        assert loaded.faults == ()
        tally.add(wrong=bad)
        restarted = make_store(MODEL, folder)
        for chunk in chunks:  # the next writer sweeps and completes
            restarted.put(chunk)
        assert list((folder / "tmp").iterdir()) == []
        assert load(folder)[0].tokens == len(IDS) - 1


def at_each_step(before: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Call ``before`` ahead of every write (of at most a hundred bytes), sync and rename of this process."""
    real_write = os.write

    def noticed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before()
            return call(*args)

        return run

    patch.setattr(os, "write", noticed(lambda file, data: real_write(file, data[:100])))
    patch.setattr(os, "fsync", noticed(os.fsync))
    patch.setattr(Path, "rename", noticed(Path.rename))


def count_steps(folder: Path, store: PrefixStore, chunks: Sequence[Any]) -> int:
    """Steps of a writer whom nobody kills."""
    steps = itertools.count()
    for number in (3, 4):
        blob(folder, number).unlink()
    with pytest.MonkeyPatch.context() as patch:
        at_each_step(lambda: next(steps), patch)
        for chunk in chunks:
            store.put(chunk)
    return next(steps)


def die_at(point: int) -> None:
    """Let this process kill itself at the given one of its steps."""
    steps = itertools.count(1)

    def step() -> None:
        if next(steps) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    at_each_step(step, pytest.MonkeyPatch())  # for the rest of its life


@contextlib.contextmanager
def failing_from(first: int, code: int) -> Iterator[None]:
    """Every write and rename from number ``first`` on fails with ``code``."""
    calls, real_write = itertools.count(), os.write

    def fail(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if next(calls) >= first:
                raise OSError(code, os.strerror(code))
            return call(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", fail(lambda file, data: real_write(file, data[:2000])))
        patch.setattr(Path, "rename", fail(Path.rename))
        yield


@pytest.mark.fault("full", "over quota, read-only, I/O error, no permission: every write and rename")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_writes_that_fail_at_every_stage(folder: Path, code: int, tally: Tally) -> None:
    full = MODEL.cache()
    MODEL.prefill(full, IDS)
    store = make_store(MODEL, folder)
    chunk = store.capture(IDS, full, 3)
    for failing in range(12):
        blob(folder, 3).unlink(missing_ok=True)
        with failing_from(failing, code), contextlib.suppress(StoreError):
            store.put(chunk)
        loaded, bad = load(folder)
        assert loaded.tokens in {3 * CHUNK, len(IDS) - 1} or code in {errno.ENOSPC, errno.EDQUOT}  # then others make room
        assert loaded.faults == ()
        assert list((folder / "tmp").iterdir()) == []
        tally.add(wrong=bad)
        assert store.save(IDS, full) == CHUNKS


@pytest.mark.fault("stale", "the folder goes away")
def test_a_folder_that_goes_away(folder: Path) -> None:
    store = make_store(MODEL, folder)
    (folder / "blobs").rename(folder / "moved")
    loaded, wrong = load(folder, store)
    assert (loaded.tokens, loaded.faults, wrong) == (0, (), 0)
    (folder / "moved").rename(folder / "blobs")
    assert load(folder, store)[0].tokens == len(IDS) - 1


@pytest.mark.fault("permission", "a folder of somebody else")
def test_no_permission(folder: Path) -> None:
    """Root becomes somebody else, others take their own permission away; neither to read nor to write."""
    root = os.geteuid() == 0
    full = MODEL.cache()
    MODEL.prefill(full, IDS)
    if root:
        os.seteuid(65534)
    else:
        (folder / "blobs").chmod(0)
    try:
        loaded, wrong = load(folder)
        with pytest.raises(StoreError, match="ermission"):
            make_store(MODEL, folder).save(IDS, full)
    finally:
        if root:
            os.seteuid(0)
        else:
            (folder / "blobs").chmod(0o700)
    assert (loaded.tokens, wrong) == (0, 0)
    assert "ermission" in loaded.faults[0]


@pytest.mark.fault("paths", "pipes and links, by a prefix store")
def test_pipes_and_links_in_the_place_of_blobs(folder: Path) -> None:
    """A pipe would block a reader for ever; the deadline is far, so a hang would show."""
    file = blob(folder, 1)
    kept = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    started = time.monotonic()
    loaded, wrong = load(folder)
    assert (loaded.tokens, wrong) == (CHUNK, 0)
    assert time.monotonic() - started < 60
    (folder / "elsewhere").write_bytes(kept)
    file.symlink_to(folder / "elsewhere")
    loaded, wrong = load(folder)
    assert (loaded.tokens, wrong) == (CHUNK, 0)
    file.unlink(missing_ok=True)
