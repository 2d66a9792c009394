"""A prefix store that cannot be used is told at start, before a model is loaded; one that may come back only warns."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from vericache_core.cli.main import main
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.url import check_store


def nobody() -> str:
    """An address on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_store_that_works_is_left_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_store(f"file://{tmp_path}/new?required=yes")
    assert list((tmp_path / "new" / "blobs").iterdir()) == []
    check_store("memory://here")
    assert not caplog.records


@pytest.mark.fault("settings", "a prefix store that is no folder, before a model is loaded")
@pytest.mark.parametrize("place", ["a-file/below", "a-file"])
def test_a_folder_that_cannot_be_used_is_an_error(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a-file").write_text("")
    url = f"file://{tmp_path}/{place}"
    assert main(["generate", "-m", "/nowhere", "--prefix-store", url, "a prompt"]) == 2
    err = capsys.readouterr().err
    assert f"prefix store '{url}' cannot be used" in err
    assert "hint: name a folder" in err
    assert "nowhere" not in err


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

    monkeypatch.setattr(DiskBlobs, "put", failing)
    check_store(f"file://{tmp_path}")
    assert "not now" in caplog.text
    with pytest.raises(ConfigError, match="cannot be used"):
        check_store(f"file://{tmp_path}?required=yes")


@pytest.mark.fault("refused", "Redis, at start")
def test_a_server_that_is_away_is_warned_of_and_an_error_where_it_is_required(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis", reason="needs vericache[redis]")
    url = f"redis://somebody:secret@{nobody()}"
    with caplog.at_level(logging.WARNING, "vericache.stores"):
        check_store(f"{url}?timeout=5")
    (record,) = caplog.records
    assert "does not answer" in record.message
    assert "secret" not in record.message
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        check_store(f"{url}?timeout=5&required=yes")
    assert "secret" not in str(caught.value)


@pytest.mark.fault("settings", "a word of a prefix store's address")
def test_required_is_yes_or_no(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="required=maybe"):
        check_store(f"file://{tmp_path}?required=maybe")
