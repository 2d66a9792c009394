"""Blobs as files of a folder: written aside, made durable, then renamed into place.

A blob is there once its final name is, and the name appears only after everything before it is on the disk. So a
reader sees a whole blob or none, and a writer that dies leaves at most a file in ``tmp/``, which the next process to
open the folder removes. Several processes may share a folder: the folder is the index, and only making room and
renaming happen under a lock. A file ends with a commit record (magic and length), so one that was cut or added to
from outside is told apart before it is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote

from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout, StoreUnusable
from vericache_core.sizes import exact_size
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.keys import KEY, check_key

_RECORD = struct.Struct("<8sQ")
_MAGIC = b"VCOMMIT\n"
_BLOCK = 8 << 20
"""Bytes written or read between two looks at the clock."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}
_numbers = itertools.count()


class DiskBlobs:
    """See :class:`vericache_core.stores.blobs.BlobStore` and the module docstring.

    Building one touches nothing: a folder that cannot be used is a ``StoreError`` of each call, until it can.

    Args:
        folder: made when it is missing, readable by its owner only.
        most_bytes: of all blobs together; the least recently used go first. None for no limit.
        durable: wait for the disk before a blob becomes visible.
        mapped: hand out mappings, which cost no copy; False reads into memory, for file systems whose pages may fail
            to come (a mapping then ends the process, a read is a ``StoreError``).
        private: refuse a folder that belongs to another user or that others may write to.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int | None = None,
        *,
        durable: bool = True,
        mapped: bool = True,
        private: bool = False,
    ) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._durable, self._mapped, self._private = durable, mapped, private
        self._blobs, self._aside = folder / "blobs", folder / "tmp"
        self._pins: Counter[str] = Counter()
        self._pins_lock = threading.Lock()
        self._opened = False

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        path = self._path(key)
        _in_time(deadline)
        with _told(f"blob {key} could not be read"):
            try:
                # Neither a link nor a pipe may stand for a blob: the one leads elsewhere, the other blocks.
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            try:
                found = self._read(file, deadline)
                if found is None:
                    with contextlib.suppress(OSError):  # a good one may take its place, unless the folder is read-only
                        path.unlink()
                    raise StoreError(f"blob {key} is damaged", cause="it was cut or added to, and is removed")
                _touch(file)
                return found
            finally:
                os.close(file)

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        path = self._path(key)
        size = sum(memoryview(part).nbytes for part in parts) + _RECORD.size
        if self.most_bytes is not None and size > self.most_bytes:
            raise StoreFull(
                f"a blob of {exact_size(size)} does not fit into {exact_size(self.most_bytes)}",
                hint="raise bytes= of the store",
            )
        with _told(f"blob {key} could not be written"):
            self._open(deadline)
            if path.exists():
                return
            try:
                self._publish(path, parts, size, deadline)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with self._locked(deadline):  # the disk is full, whatever the budget says
                    freed = self._make_room(size, least=size)
                if not freed:
                    raise
                self._publish(path, parts, size, deadline)

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        _in_time(deadline)
        with _told("the store could not be looked into"):
            return [_is_there(self._path(key)) for key in keys]

    def delete(self, key: str, *, deadline: float) -> None:
        _in_time(deadline)
        with _told(f"blob {key} could not be removed"):
            self._path(key).unlink(missing_ok=True)

    def check(self, *, deadline: float) -> None:
        """See whether the folder is one, and a file of one byte can be written into it; see ``Checkable``."""
        with _told(f"{self.folder} could not be written to"):
            try:
                self._open(deadline)
            except OSError as error:
                readable = os.access(self.folder, os.R_OK | os.X_OK, effective_ids=True)
                if error.errno in _NO_FOLDER or (error.errno in _DENIED and not readable):
                    raise StoreUnusable(f"{self.folder} is no folder to keep blobs in", cause=str(error)) from error
                raise
            with self._locked(deadline):  # nobody takes it for a dead writer's meanwhile
                try:
                    self._try_to_write()
                except OSError as error:
                    if error.errno not in _FULL or not self._entries():  # a put makes room, where something can go
                        raise

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[str]) -> Iterator[None]:
        with self._pins_lock:
            self._pins.update(keys)
        try:
            yield
        finally:
            with self._pins_lock:
                self._pins.subtract(keys)
                self._pins = +self._pins
            for key in reversed(keys):  # the first was used last: a chain of chunks is to be evicted from its end
                _touch(self._path(key))

    def close(self) -> None:
        """Nothing is held between calls."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs."""
        return sum(size for _, size, _ in self._entries())

    # -- inside --------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self._blobs / check_key(key)

    def _open(self, deadline: float) -> None:
        """Make the folder, and once per process remove what dead writers left."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._private:
            _refuse_foreign(self.folder)
        for folder in (self._blobs, self._aside):
            folder.mkdir(exist_ok=True, mode=0o700)
        if self._opened:
            return
        with self._locked(deadline):
            for left in self._aside.iterdir():
                _remove_if_dead(left)
            self._make_room(0)
        self._opened = True

    def _try_to_write(self) -> None:
        temporary = self._aside / f"{os.getpid()}-{next(_numbers)}"
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, b"?")
        finally:
            os.close(file)
            temporary.unlink(missing_ok=True)

    def _read(self, file: int, deadline: float) -> memoryview | None:
        """The blob in an open file; None if the commit record at its end does not fit."""
        facts = os.fstat(file)
        length = facts.st_size - _RECORD.size
        if not stat.S_ISREG(facts.st_mode) or length < 0:
            return None
        if os.pread(file, _RECORD.size, length) != _RECORD.pack(_MAGIC, length):
            return None
        if self._mapped:
            return self._map(file, facts.st_size)[:length]
        data = memoryview(bytearray(length))
        done = 0
        while done < length:
            count = os.preadv(file, [data[done : done + _BLOCK]], done)
            if count == 0:
                return None
            done += count
            _in_time(deadline)
        return data.toreadonly()

    def _map(self, file: int, size: int) -> memoryview:
        """A read-only mapping of an open file."""
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ))

    def _allot(self, file: int, size: int, in_time: Callable[[], None]) -> None:
        """Called before ``size`` bytes are written into a new file; ``in_time`` raises past the deadline."""

    def _publish(self, path: Path, parts: Sequence[Buffer], size: int, deadline: float) -> None:
        temporary = self._aside / f"{os.getpid()}-{next(_numbers)}"
        with self._locked(deadline):  # or a process that sweeps could find the file before it is known to be alive
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self._allot(file, size, lambda: _in_time(deadline))
            for part in (*parts, _RECORD.pack(_MAGIC, size - _RECORD.size)):
                _write(file, memoryview(part).cast("B"), deadline)
            _touch(file)
            if self._durable:
                os.fsync(file)
            with self._locked(deadline):
                self._make_room(size)
                temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        if self._durable:
            _sync_folder(self._blobs)

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """Alone among all processes; the lock goes with a process that dies."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    _in_time(deadline)
                    time.sleep(0.002)
            yield
        finally:
            os.close(file)

    def _entries(self) -> list[tuple[int, int, Path]]:
        """``(last use, bytes, path)`` of every blob, the least recently used first."""
        found = []
        with os.scandir(self._blobs) as files:
            for file in files:
                # Others may remove files at any moment; a name that is no key is not ours.
                with contextlib.suppress(FileNotFoundError):
                    if KEY.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        facts = file.stat(follow_symlinks=False)
                        found.append((facts.st_mtime_ns, facts.st_size, Path(file.path)))
        return sorted(found)

    def _make_room(self, size: int, least: int = 0) -> int:
        """Evict until ``size`` bytes fit into the budget and ``least`` bytes are freed; returns how many were.

        Raises:
            StoreFull: the rest is pinned.
        """
        if self.most_bytes is None and not least:
            return 0
        entries = self._entries()
        limit = float("inf") if self.most_bytes is None else self.most_bytes - size
        held, freed = sum(size for _, size, _ in entries), 0
        for _, own, path in entries:
            if held <= limit and freed >= least:
                break
            if self._pins[path.name]:
                continue
            path.unlink(missing_ok=True)
            held, freed = held - own, freed + own
        if self.most_bytes is not None and held > limit:
            text = f"{exact_size(size)} do not fit into {exact_size(self.most_bytes)}"
            raise StoreFull(text, cause=f"{exact_size(held)} are pinned")
        return freed


def from_url(url: SplitResult, options: Mapping[str, str | int | None]) -> DiskBlobs:
    """``file:///folder?bytes=10GB&map=no``; see :mod:`vericache_core.stores.url`."""
    if url.netloc not in {"", "localhost"} or not url.path.strip("/"):
        raise ConfigError("a file store is named by an absolute folder", hint="file:///var/cache/vericache?bytes=10GB")
    most = options.get("bytes")
    assert most is None or isinstance(most, int)
    mapping = options.get("map", "yes")
    if mapping not in {"yes", "no"}:
        raise ConfigError(f"map={mapping}: expected yes or no")
    return DiskBlobs(Path(unquote(url.path)), most, mapped=mapping == "yes")


def _write(file: int, data: memoryview, deadline: float) -> None:
    done = 0
    while done < data.nbytes:
        _in_time(deadline)
        done += os.write(file, data[done : done + _BLOCK])


def _in_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise StoreTimeout("the store took too long")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the operating system says into the errors of the protocol."""
    try:
        yield
    except OSError as error:
        raise (StoreFull if error.errno in _FULL else StoreError)(what, cause=str(error)) from error
    except MemoryError as error:
        raise StoreError(what, cause="no memory") from error


def _touch(file: int | Path) -> None:
    """Note that a blob was just used. Only a hint: it may be gone meanwhile, or the folder be read-only."""
    now = time.time_ns()  # the system's own "now" for files moves in steps of milliseconds
    with contextlib.suppress(OSError):
        os.utime(file, ns=(now, now))


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove_if_dead(left: Path) -> None:
    """Remove a file of ``tmp/`` whose writer is gone; one that lives has it locked."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(left, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)
        except BlockingIOError:
            return
        finally:
            os.close(file)


def _refuse_foreign(folder: Path) -> None:
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise StoreUnusable(f"{folder} belongs to somebody else, or others may write to it", hint="choose another name")
