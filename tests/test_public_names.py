from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vericache_core
import vericache_core.plugins

PACKAGES = {"vericache_core": vericache_core, "vericache_core.plugins": vericache_core.plugins}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_resolves(package: str) -> None:
    module = PACKAGES[package]
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_and_python_see_the_same_names(package: str) -> None:
    module = PACKAGES[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    running = {name: home for home, names in module._HOMES.items() for name in names}
    assert typed == running


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        PACKAGES[package].no_such_name  # noqa: B018  # the access is the test


@pytest.mark.parametrize("module", ["vericache_core", "vericache_core.config", "vericache_core.plugins.registry"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy', 'pluggy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.strip() == "[]"
