"""A prefix store that cannot be used is told at start, before a model is loaded; one that may come back only warns."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cache.test_stop import ends
from tests.models import model
from vericache_core.cli.main import main
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout
from vericache_core.plugins.registry import Registry
from vericache_core.stores import url as urls
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.keys import PROBE
from vericache_core.stores.start import check_store


def nobody() -> str:
    """An address on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def put(folder: Path, key: str, data: bytes = b"a blob") -> None:
    DiskBlobs(folder).put(key, [data], deadline=float("inf"))


def refusing(code: int, monkeypatch: pytest.MonkeyPatch, what: Sequence[str] = ("open", "mkdir", "write")) -> None:
    """From now on nothing may be made or written to; what is there can be read. Root, too, is told so."""
    real_open, real_mkdir = os.open, os.mkdir

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, flags, *rest, **named)

    def making(path: Any, *rest: Any, **named: Any) -> None:
        if not os.path.lexists(path):
            raise OSError(code, os.strerror(code), str(path))
        real_mkdir(path, *rest, **named)

    def writing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    for name, call in {"open": opening, "mkdir": making, "write": writing}.items():
        if name in what:
            monkeypatch.setattr(os, name, call)


def test_a_store_that_works_is_left_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_store(f"file://{tmp_path}/new?required=yes")
    assert list((tmp_path / "new" / "blobs").iterdir()) == list((tmp_path / "new" / "tmp").iterdir()) == []
    check_store("memory://here?required=yes")
    assert not caplog.records


@pytest.mark.fault("settings", "a prefix store that is no folder, before a model is loaded")
@pytest.mark.parametrize("place", ["a-file/below", "a-file", "a-link", "x" * 300])
def test_a_folder_that_cannot_be_used_is_an_error(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-link").symlink_to(tmp_path / "a-link")
    url = f"file://{tmp_path}/{place}"
    assert main(["generate", "-m", "/nowhere", "--prefix-store", url, "a prompt"]) == 2
    err = capsys.readouterr().err
    assert f"prefix store '{url}' cannot be used" in err
    assert "hint: name a folder" in err
    assert "nowhere" not in err


@pytest.mark.fault("permission", "shared memory of somebody else, at start")
def test_shared_memory_that_is_not_ours_has_a_hint_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vericache_core.stores.memory.ROOT", tmp_path)
    theirs = tmp_path / f"vericache-{os.getuid()}-theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        check_store("shm://theirs")
    assert caught.value.hint == "choose another name"
    (tmp_path / f"vericache-{os.getuid()}-file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        check_store("shm://file")
    assert caught.value.hint is not None
    assert "file:// store" in caught.value.hint


@pytest.mark.fault("permission", "a folder that may only be read, at start")
@pytest.mark.parametrize("required", ["yes", "no"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_only_be_read_is_read(
    code: int, required: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a")
    refusing(code, monkeypatch)
    check_store(f"file://{tmp_path}?required={required}")
    (record,) = caplog.records
    assert "prefixes are loaded but not saved" in record.message
    assert os.strerror(code) in record.message
    with pytest.raises(ConfigError, match="no folder to keep blobs in"):  # neither to be read nor to be made
        check_store(f"file://{tmp_path}/missing")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(StoreTimeout, marks=pytest.mark.fault("hang", "a folder, at start")),
        pytest.param(StoreFull, marks=pytest.mark.fault("space", "a folder, at start")),
    ],
)
def test_a_folder_that_is_full_or_slow_is_not(
    kind: type[StoreError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise kind("not now")

    monkeypatch.setattr(DiskBlobs, "check", failing)
    check_store(f"file://{tmp_path}")
    assert "not now" in caplog.text
    if kind is StoreFull:
        check_store(f"file://{tmp_path}?required=yes")
        assert caplog.text.count("loaded but not saved") == 2
    else:
        with pytest.raises(ConfigError, match="does not answer"):
            check_store(f"file://{tmp_path}?required=yes")


@pytest.mark.fault("space", "a full disk, at start")
def test_a_full_disk_is_warned_of_and_costs_no_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_store(f"file://{tmp_path}")
    with monkeypatch.context() as patch:
        refusing(errno.ENOSPC, patch, ["write"])
        check_store(f"file://{tmp_path}")
    (record,) = caplog.records
    assert "prefixes are loaded but not saved" in record.message
    put(tmp_path, "a")
    check_store(f"file://{tmp_path}?bytes=30")  # not even where the budget is used up
    refusing(errno.ENOSPC, monkeypatch, ["write"])
    check_store(f"file://{tmp_path}?bytes=30")
    assert [file.name for file in (tmp_path / "blobs").iterdir()] == ["a"]
    assert len(caplog.records) == 1  # a put would make room


@pytest.mark.fault("refused", "a folder that fails for now, at start")
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_folder_that_fails_for_now_is_warned_of(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of a network's file system was restarted, say; it has nothing to do with how the folder is named."""

    def failing(*_: Any, **__: Any) -> None:
        raise StoreError("it failed") from OSError(code, os.strerror(code))

    monkeypatch.setattr(DiskBlobs, "contains", failing)
    refusing(code, monkeypatch)
    check_store(f"file://{tmp_path}/new")
    (record,) = caplog.records
    assert "does not answer" in record.message
    assert "every prompt is computed" in record.message
    with pytest.raises(ConfigError, match="does not answer"):
        check_store(f"file://{tmp_path}/new?required=yes")


@pytest.mark.fault("hang", "a folder, at any call, at start")
def test_a_folder_that_hangs_does_not_hang_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        never.wait()

    for call in ("check", "put", "contains", "delete"):
        monkeypatch.setattr(DiskBlobs, call, hang)
    try:
        ends(lambda: check_store(f"file://{tmp_path}?timeout=0.2"))
        (record,) = caplog.records
        assert "does not answer" in record.message
        with pytest.raises(ConfigError, match="does not answer"):
            check_store(f"file://{tmp_path}?timeout=0.2&required=yes")
    finally:
        never.set()


@pytest.mark.fault("refused", "Redis, at start")
def test_a_server_that_is_away_is_warned_of_and_an_error_where_it_is_required(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis", reason="needs vericache[redis]")
    url = f"redis://somebody:secret@{nobody()}"
    with caplog.at_level(logging.WARNING, "vericache.stores"):
        check_store(f"{url}?timeout=5")
    (record,) = caplog.records
    assert "does not answer" in record.message
    assert "secret" not in record.message
    with pytest.raises(ConfigError, match="does not answer") as caught:
        check_store(f"{url}?timeout=5&required=yes")
    assert "secret" not in str(caught.value)


class Asked:
    """A backend that is no folder, and what it was asked for."""

    def __init__(self, *, away: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.away = away

    def __getattr__(self, name: str) -> Any:
        if name == "check":  # it has none
            raise AttributeError(name)

        def call(*arguments: Any, **_: Any) -> Any:
            self.calls.append((name, *arguments))
            if self.away and name == "contains":
                raise StoreError("nobody is there")
            return [False]

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What ``asked://`` opens, once each time, and too costly to be opened twice."""
    found = Asked()
    scheme = urls.Scheme(f"{__name__}:opened", frozenset(), attempts=1, cheap=False)
    monkeypatch.setitem(urls.SCHEMES, "asked", scheme)
    monkeypatch.setattr(f"{__name__}.opened", lambda *_: found, raising=False)
    return found


def engine(url: str) -> Engine:
    return Engine(model("llama"), None, EngineConfig(rows=16, probe=False, prefix_store=url), Registry(discover=False))


def test_a_store_elsewhere_is_asked_and_nothing_is_put(backend: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(urls.SCHEMES, "asked", urls.Scheme(f"{__name__}:opened", frozenset()))
    check_store("asked://here")
    assert backend.calls == [("contains", [PROBE]), ("close",)]


@pytest.mark.fault("refused", "a store that is required, at start")
def test_a_required_store_is_looked_at_when_it_is_used(backend: Asked) -> None:
    """Also one that is too much to open twice, and however the engine came about."""
    check_store("asked://here?required=yes")
    assert backend.calls == []
    backend.away = True
    with pytest.raises(ConfigError, match="does not answer"):
        engine("asked://here?required=yes")
    assert backend.calls[-1] == ("close",)
    with engine("asked://here"):
        pass
    backend.away = False
    with engine("asked://here?required=yes"):
        pass


@pytest.mark.fault("settings", "a word of a prefix store's address")
def test_required_is_yes_or_no(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="required=maybe"):
        check_store(f"file://{tmp_path}?required=maybe")
