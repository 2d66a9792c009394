from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vericache_core.bench.transport import GOALS, Times, Transport, measure, opened
from vericache_core.cli.main import main
from vericache_core.errors import StoreError, UsageError
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.disk import DiskBlobs


class Slow(DiskBlobs):
    """Fails, or changes a byte, from the second put on."""

    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(folder)
        self._how, self._puts = how, 0

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        self._puts += 1
        if self._puts > 1 and self._how == "fails":
            raise StoreError("down")
        if self._puts > 1 and self._how == "changes":
            parts = [bytes(parts[0])[:-1] + b"\0"]
        super().put(key, parts, deadline=deadline)


def test_times_become_ratios_to_a_copy(tmp_path: Path) -> None:
    ticks = itertools.count()
    found = measure({"file": DiskBlobs(tmp_path)}, 1000, 3, clock=lambda: float(next(ticks)))
    assert found.memcpy == [1.0] * 3
    assert found.backends["file"].load == found.backends["file"].again == [1.0] * 3
    ratio = found.ratio([2.0, 4.0, 9.0])
    assert (ratio.median, ratio.least, ratio.most) == (4.0, 2.0, 9.0)
    assert found.goal("file") == ("load", 1.0, True)
    assert found.goal("other") is None
    assert list((tmp_path / "blobs").iterdir()) == []


@pytest.mark.parametrize("name", GOALS)
def test_a_goal_is_met_or_missed(name: str) -> None:
    operation, most = GOALS[name]
    for seconds, met in ((most, True), (most * 1.01, False)):
        times = Times([0.0], [0.0], [0.0])
        setattr(times, operation, [seconds])
        assert Transport(1, memcpy=[1.0], backends={name: times}).goal(name) == (operation, most, met)


@pytest.mark.parametrize("how", ["fails", "changes"])
def test_a_store_that_fails_or_changes_blobs_has_no_figures(tmp_path: Path, how: str) -> None:
    found = measure({"bad": Slow(tmp_path / "a", how), "good": DiskBlobs(tmp_path / "b")}, 1000, 3)
    assert list(found.backends) == ["good"]
    assert ("down" if how == "fails" else "changed") in found.failed["bad"]


def test_unknown_backend() -> None:
    with pytest.raises(UsageError, match="tape"), opened(["tape"], print):
        pass


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["file", "shm", *(["redis"] if shutil.which("redis-server") else [])]
    flags = [word for name in names for word in ("--backend", name)]
    assert main(["bench", "transport", "--size", "2MiB", "--repeats", "2", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "vericache.bench.transport/1"
    assert sorted(report["backends"]) == sorted(names)
    assert report["size"] == 2 << 20
    assert report["large_pages"].keys() == {"shm"}
    assert report["backends"]["shm"]["again"]["median"] > 0
    assert main(["bench", "transport", "--size", "1MiB", "--repeats", "1", "--backend", "memory://bench"]) == 0
    assert "memory://bench" in capsys.readouterr().out
    assert main(["bench", "transport", "--backend", "tape"]) == 2


def test_help_imports_no_torch() -> None:
    command = "main(['bench', 'transport', '--help'])"
    code = f"import sys; from vericache_core.cli.main import main; {command}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
