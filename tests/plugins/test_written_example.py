"""The compressor that ``docs/writing-a-compressor.md`` shows: short, complete, and as exact as any other."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import model, prompt
from tests.sdk.making import cache, descriptor, view
from vericache_core.config import EngineConfig
from vericache_core.context import CompressContext
from vericache_core.engine import Engine
from vericache_core.plugins.registry import Registry, set_default_registry
from vericache_core.plugins.testing import on_path, write_distribution
from vericache_core.runtime.sampling_params import SamplingParams

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-compressor.md"
MODULE = "src/vericache_compressor_norm/__init__.py"
IN_A_PROCESS = {"S-02", "S-03", "S-05", "S-06", "S-07", "C-07", "C-09"}
"""Checks that install or start processes; the slow test installs."""


def files() -> dict[str, str]:
    """Path -> text of every block that begins with the name of its file."""
    blocks = re.findall(
        r"^```\w+\n# (\S+\.(?:py|toml))\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Registry]:
    """The example written into an empty folder, and what an installer would make of its project file."""
    for path, text in files().items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry_points = project["entry-points"]["vericache.compressors"]
    write_distribution(tmp_path / "src", project["name"], entry_points, version=project["version"])
    with on_path(tmp_path / "src"):
        yield Registry()
    set_default_registry(None)


def test_it_is_whole_and_at_most_60_lines_with_its_registration() -> None:
    found = files()
    assert found.keys() == {MODULE, "pyproject.toml"}
    assert sum(len(text.splitlines()) for text in found.values()) <= 60


def test_the_output_is_that_of_plain_decoding(installed: Registry) -> None:
    assert "vericache-compressor-norm" in [info.distribution for info in installed.list_plugins() if info.name == "norm"]
    config = EngineConfig(rows=16, window=4, probe=False, compressor="norm", keep=0.5, full_kv="host")
    with Engine(model("llama"), None, config, installed) as engine:
        ids, params = prompt(90, seed=5), SamplingParams(max_new_tokens=24)
        (output,) = engine.generate(ids, params, record_logits=True)
        (plain,) = engine.generate(ids, params, record_logits=True, compressor=None)
    assert output.token_ids == plain.token_ids
    assert output.logits is not None
    assert plain.logits is not None
    assert torch.equal(output.logits.view(torch.uint8), plain.logits.view(torch.uint8))
    metrics = output.metrics
    assert metrics.degraded == []
    assert metrics.drafted > 0
    assert 0.49 < metrics.compressed_kv_bytes / metrics.compressed_from_bytes < 0.53


def test_the_smallest_keys_and_the_newest_tokens_survive(installed: Registry) -> None:
    compressor = installed.create("norm", {"keep_tokens": "12", "recent": "3"})
    layers = [descriptor(index) for index in range(2)]
    prefix = view(layers, cache(layers, 40), 0, 40)
    made = compressor.compress(prefix, CompressContext(protected=((0, 2),)))
    for layer in layers:
        keys, _ = prefix.rows(layer.index)
        stored = made.layers[layer.index]
        assert stored is not None
        for head in range(layer.kv_heads):
            norms = keys[head].float().norm(dim=-1)
            must = {0, 1, 37, 38, 39}
            rest = sorted((float(norms[i]), i) for i in range(40) if i not in must)
            assert set(stored.surviving.head(head).tolist()) == must | {i for _, i in rest[:7]}


def test_it_passes_the_fast_part_of_the_suite(installed: Registry) -> None:
    pytest.importorskip("vericache_conform")
    from vericache_conform.catalogue import select
    from vericache_conform.execute import Settings, execute
    from vericache_conform.subject import resolve

    assert "norm" in installed.names()
    subject = resolve("norm")
    results = [execute(check, subject, Settings()) for check in select(["static", "contract"]) if check.id not in IN_A_PROCESS]
    assert [f"{result.check}: {result.message}" for result in results if result.bad] == []
    assert sum(result.outcome == "pass" for result in results) > 20


@pytest.mark.slow
def test_pip_installs_it_from_an_empty_folder(tmp_path: Path) -> None:
    for path, text in files().items():
        (tmp_path / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / path).write_text(text, encoding="utf-8")
    site = str(tmp_path / "site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, str(tmp_path / "project")], check=True)
    (found,) = importlib.metadata.distributions(path=[site])
    assert [(point.name, point.value) for point in found.entry_points] == [("norm", "vericache_compressor_norm")]
    with on_path(Path(site)):
        assert Registry().create("norm", {"keep": "0.5"}).name == "norm"
