"""The two compressors that ``docs/writing-a-compressor.md`` shows: short, complete, and as exact as any other."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import model, prompt
from tests.sdk.making import cache, descriptor, view
from vericache_core.coded import CodedLayer
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
MODULES = {name: f"src/vericache_compressor_{name}/__init__.py" for name in ("norm", "nf4")}
IN_A_PROCESS = {"S-02", "S-03", "S-05", "S-06", "S-07", "C-07", "C-09"}
"""Checks that install or start processes; the slow test installs."""


def blocks() -> dict[str, str]:
    """Path -> text of every block that begins with the name of its file."""
    found = re.findall(r"^```\w+\n# (\S+\.(?:py|toml))\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return dict(found)


def files(name: str) -> dict[str, str]:
    """The files of one example; the page shows the project file of ``norm``, and says how the other one differs."""
    found = blocks()
    return {MODULES[name]: found[MODULES[name]], "pyproject.toml": found["pyproject.toml"].replace("norm", name)}


@pytest.fixture
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    """The example written into an empty folder, and what an installer would make of its project file."""
    for path, text in files(getattr(request, "param", "norm")).items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry_points = project["entry-points"]["vericache.compressors"]
    write_distribution(tmp_path / "src", project["name"], entry_points, version=project["version"])
    with on_path(tmp_path / "src"):
        yield Registry()
    set_default_registry(None)


def test_the_page_shows_two_whole_packages_in_few_lines() -> None:
    assert blocks().keys() == {*MODULES.values(), "pyproject.toml"}
    lines = {name: sum(len(text.splitlines()) for text in files(name).values()) for name in MODULES}
    assert lines["norm"] <= 60
    assert lines["nf4"] <= 90  # its table and its arithmetic are the method


@pytest.mark.parametrize(
    ("installed", "settings", "least", "most"),
    [("norm", {"keep": 0.5}, 0.49, 0.53), ("nf4", {"options": {"residual": 8}}, 0.20, 0.29)],
    indirect=["installed"],
)
def test_the_output_is_that_of_plain_decoding(
    installed: Registry, settings: dict[str, Any], least: float, most: float, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["installed"]
    assert f"vericache-compressor-{name}" in [info.distribution for info in installed.list_plugins() if info.name == name]
    config = EngineConfig(rows=16, window=4, probe=False, compressor=name, full_kv="host", **settings)
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
    assert least < metrics.compressed_kv_bytes / metrics.compressed_from_bytes < most


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


@pytest.mark.parametrize("installed", ["nf4"], indirect=True)
def test_a_number_becomes_the_nearest_entry_of_the_table_times_the_largest_of_its_row(installed: Registry) -> None:
    layers = [descriptor(head_dim=16)]
    prefix = view(layers, cache(layers, 40), 0, 40)
    layer = installed.create("nf4", {"residual": 4}).compress(prefix, CompressContext()).layers[0]
    assert isinstance(layer, CodedLayer)
    assert layer.parts() is not None  # kernels read the codes as they are
    table = sys.modules["vericache_compressor_nf4"].TABLE.tolist()
    for rows, stream in zip(prefix.rows(0), (layer.keys, layer.values), strict=True):
        made = stream.decoded()
        assert stream.encoded_tokens == 36
        assert torch.equal(made[:, 36:], rows[:, 36:])
        for head, token, channel in ((0, 0, 0), (1, 7, 15), (0, 35, 3)):
            scale = float(rows[head, token].abs().max())
            nearest = min(table, key=lambda entry: abs(entry - float(rows[head, token, channel]) / scale))
            assert float(made[head, token, channel]) == pytest.approx(nearest * scale, rel=1e-6)


@pytest.mark.parametrize("installed", MODULES, indirect=True)
def test_it_passes_the_fast_part_of_the_suite(installed: Registry, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("vericache_conform")
    from vericache_conform.catalogue import select
    from vericache_conform.execute import Settings, execute
    from vericache_conform.subject import resolve

    name = request.node.callspec.params["installed"]
    assert name in installed.names()
    subject = resolve(name)
    results = [execute(check, subject, Settings()) for check in select(["static", "contract"]) if check.id not in IN_A_PROCESS]
    assert [f"{result.check}: {result.message}" for result in results if result.bad] == []
    assert sum(result.outcome == "pass" for result in results) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_pip_installs_it_from_an_empty_folder(name: str, tmp_path: Path) -> None:
    for path, text in files(name).items():
        (tmp_path / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / path).write_text(text, encoding="utf-8")
    site = str(tmp_path / "site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, str(tmp_path / "project")], check=True)
    (found,) = importlib.metadata.distributions(path=[site])
    assert [(point.name, point.value) for point in found.entry_points] == [(name, f"vericache_compressor_{name}")]
    with on_path(Path(site)):
        assert Registry().create(name).name == name
