"""What holds whether or not kvpress is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vericache_compressor_kvpress import KvpressOptions
from vericache_compressor_kvpress.plugin import vericache_compressors
from vericache_compressor_kvpress.survivors import masked_survivors, matched_survivors
from vericache_compressor_kvpress.table import NOT_OFFERED, PREFIX, PRESSES
from vericache_core.errors import CompressorFault, OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_every_press_has_an_entry_point_and_a_spec() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [PREFIX + name for name in PRESSES]
    assert list(project["entry-points"]["vericache.compressors"]) == names
    assert [spec.name for spec in vericache_compressors()] == names
    assert not {press.class_name for press in PRESSES.values()} & set(NOT_OFFERED)


def test_the_readme_lists_every_press() -> None:
    text = (ROOT / "README.md").read_text()
    for name, press in PRESSES.items():
        assert f"| `{PREFIX}{name}` | `{press.class_name}` |" in text
    for name, reason in NOT_OFFERED.items():
        assert f"| `{name}` | {reason} |" in text


def test_the_plugin_imports_no_kvpress() -> None:
    source = str(ROOT / "src")
    code = f"import sys; sys.path.insert(0, {source!r}); import vericache_compressor_kvpress.plugin as plugin; "
    code += "plugin.vericache_compressors(); sys.exit('kvpress' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("compression_ratio=0.5",), "set through keep"), (("window_size",), "name=value"), (("a b=1",), "name=value")],
)
def test_bad_arguments_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        KvpressOptions(arguments=arguments)


def test_arguments_are_python_values_or_text() -> None:
    options = KvpressOptions(arguments=("window_size=32", "use_vnorm=False", "leverage_type=key"))
    assert options.parsed_arguments() == {"window_size": 32, "use_vnorm": False, "leverage_type": "key"}


def test_survivors_are_found_by_their_bytes() -> None:
    keys = torch.randn(1, 2, 9, 4)
    after = torch.stack([keys[0, 0, [7, 2, 5]], keys[0, 1, [0, 8, 1]]]).unsqueeze(0)
    assert [head.tolist() for head in matched_survivors(keys, after)] == [[2, 5, 7], [0, 1, 8]]
    with pytest.raises(CompressorFault, match="changed keys"):
        matched_survivors(keys, after + 1)
    with pytest.raises(CompressorFault, match="alike"):
        matched_survivors(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 1, 4))


def test_masks_are_read_and_removed() -> None:
    module = torch.nn.Linear(1, 1)
    assert masked_survivors(module, 2, 4) is None
    module.masked_key_indices = (torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([3, 0]))  # type: ignore[assignment]
    found = masked_survivors(module, 2, 4)
    assert found is not None
    assert [head.tolist() for head in found] == [[0, 1, 2], [1, 2, 3]]
    assert module.masked_key_indices is None
