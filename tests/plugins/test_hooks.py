from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

from vericache_core.errors import PluginLoadError
from vericache_core.plugins import hooks
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.testing import write_distribution

SPECS = {
    name: value for name, value in vars(hooks).items() if name.startswith("vericache_") and isinstance(value, FunctionType)
}

PLUGIN = """
from dataclasses import dataclass
from vericache_core import CompressorSpec, hookimpl

@dataclass(frozen=True)
class Options:
    size: int = 1

@hookimpl
def vericache_compressors():
    return [CompressorSpec("hooked", lambda options: None, Options, "hybrid", 1)]
"""
OPTIONAL = """
@hookimpl
def vericache_conformance_options(name):
    yield {"size": 2, "for": name}

@hookimpl
def vericache_expected_failures():
    return {"D-01": "known"}
"""


@pytest.mark.parametrize("name", SPECS)
def test_each_hook_is_documented_and_tested(name: str) -> None:
    doc = SPECS[name].__doc__
    assert doc
    assert "Required." in doc or "Optional." in doc
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert f"def {name}(" in text


def test_there_are_three_hooks() -> None:
    assert len(SPECS) == 3  # the meta-test above must not pass because it found none


def test_optional_hooks_reach_the_caller_and_may_leave_out_arguments(plugin_folder: Path) -> None:
    write_distribution(plugin_folder, "hooked-dist", {"hooked": "hooked_mod"}, {"hooked_mod": PLUGIN + OPTIONAL})
    registry = Registry()
    assert registry.conformance_options("hooked") == [{"size": 2, "for": "hooked"}]
    assert registry.expected_failures("hooked") == {"D-01": "known"}


def test_optional_hooks_may_be_missing(plugin_folder: Path) -> None:
    write_distribution(plugin_folder, "hooked-dist", {"hooked": "hooked_mod"}, {"hooked_mod": PLUGIN})
    registry = Registry()
    assert registry.conformance_options("hooked") == []
    assert registry.expected_failures("hooked") == {}
    assert registry.expected_failures("identity") == {}


def test_an_optional_hook_that_raises_is_the_plugins_fault(plugin_folder: Path) -> None:
    broken = OPTIONAL.replace('yield {"size": 2, "for": name}', 'yield {}; raise RuntimeError("late")')
    write_distribution(plugin_folder, "hooked-dist", {"hooked": "hooked_mod"}, {"hooked_mod": PLUGIN + broken})
    with pytest.raises(PluginLoadError, match="late"):
        Registry().conformance_options("hooked")
