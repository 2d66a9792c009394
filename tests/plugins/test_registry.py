from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vericache_core.errors import (
    ApiVersionError,
    CompressorFault,
    OptionError,
    PluginConflictError,
    PluginLoadError,
    UnknownCompressorError,
    UsageError,
)
from vericache_core.plugins.discovery import BUILTINS, CORE_DISTRIBUTION
from vericache_core.plugins.registry import Registry, default_registry, set_default_registry
from vericache_core.plugins.spec import API_VERSION, CompressorSpec
from vericache_core.plugins.testing import isolated_registry, write_distribution

PLUGIN = """
from dataclasses import dataclass
from vericache_core.plugins.hooks import hookimpl
from vericache_core.plugins.options import Budget, option
from vericache_core.plugins.spec import CompressorSpec

@dataclass(frozen=True)
class Options(Budget):
    kernel: int = option(5, help="pooling width", ge=1)

class Compressor:
    def __init__(self, options):
        self.options = options
    def compress(self, prefix, context):
        return None

def spec(name, api_version={api}):
    return CompressorSpec(name, Compressor, Options, "token-drop", api_version)

@hookimpl
def vericache_compressors():
    return [spec({name!r})]
"""


def plugin(name: str, api: int = API_VERSION) -> str:
    return PLUGIN.format(name=name, api=api)


def install(
    folder: Path, name: str, source: str | None = None, *, distribution: str | None = None, target: str | None = None
) -> Path:
    """Install a plugin of one compressor; the module's name follows the distribution."""
    distribution = distribution or f"vericache-compressor-{name}"
    module = distribution.replace("-", "_")
    return write_distribution(
        folder, distribution, {name: target or module}, {module: plugin(name) if source is None else source}
    )


def statuses(registry: Registry) -> dict[str, str]:
    return {info.name: info.status for info in registry.list_plugins() if info.distribution != CORE_DISTRIBUTION}


class Anything:
    """A compressor, as far as the registry can tell."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def compress(self, prefix: Any, context: Any) -> None:
        return None


def in_process(name: str, factory: Any = Anything) -> CompressorSpec:
    from vericache_core.plugins.options import Budget

    return CompressorSpec(name, factory, Budget, "token-drop", API_VERSION)


# -- listing -------------------------------------------------------------------------------------------


def test_listing_imports_nothing_of_a_plugin(plugin_folder: Path) -> None:
    install(plugin_folder, "good", "raise AssertionError('imported by a listing')")
    registry = Registry()
    assert statuses(registry)["good"] == "ok?"
    assert "good" in registry.names()
    assert "vericache_compressor_good" not in sys.modules


def test_listing_shows_distribution_version_and_summary(plugin_folder: Path) -> None:
    write_distribution(plugin_folder, "some-dist", {"good": "m:obj"}, version="1.2.3", summary="keeps the good ones")
    info = next(info for info in Registry().list_plugins() if info.name == "good")
    assert (info.distribution, info.version, info.target, info.summary) == (
        "some-dist",
        "1.2.3",
        "m:obj",
        "keeps the good ones",
    )


def test_builtin_table_matches_the_builtin_plugin() -> None:
    registry = Registry(discover=False)
    assert {info.name: info.summary for info in registry.list_plugins()} == dict(BUILTINS)
    for name, summary in BUILTINS.items():
        assert registry.spec(name).summary == summary
        assert callable(registry.create(name).compress)


def test_damaged_metadata_of_one_package_hides_no_other(plugin_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(plugin_folder, "good")
    broken = install(plugin_folder, "broken")
    (broken / "entry_points.txt").write_bytes(b"[vericache.compressors]\nbroken = \xff\xfe\n")
    found = statuses(Registry())
    assert found["good"] == "ok?"
    assert "broken" not in found
    assert "unreadable metadata" in caplog.text


def test_an_illegal_name_is_listed_as_invalid_and_not_loaded(plugin_folder: Path) -> None:
    write_distribution(plugin_folder, "bad-name", {"Bad_Name": "bad_name"}, {"bad_name": "raise AssertionError"})
    registry = Registry()
    assert statuses(registry)["Bad_Name"] == "invalid"
    with pytest.raises(UnknownCompressorError):
        registry.spec("Bad_Name")


# -- loading -------------------------------------------------------------------------------------------


def test_a_plugin_loads_once_and_builds_compressors_with_parsed_options(plugin_folder: Path) -> None:
    install(plugin_folder, "good")
    registry = Registry()
    spec = registry.spec("good")
    assert registry.spec("good") is spec
    assert statuses(registry)["good"] == "ok"
    compressor: Any = registry.create("good", {"kernel": "7", "keep": "0.5"})
    assert (compressor.options.kernel, compressor.options.keep) == (7, 0.5)
    assert registry.create("good", compressor.options) is not compressor
    assert "vericache_compressor_good.py:" in registry.origin("good")
    with pytest.raises(OptionError, match="did you mean 'kernel'"):
        registry.create("good", {"kernle": 3})


def test_an_entry_point_may_name_an_object(plugin_folder: Path) -> None:
    source = plugin("good").replace(
        "@hookimpl\ndef vericache_compressors():", "class Hooks:\n  @hookimpl\n  def vericache_compressors(self):"
    )
    install(plugin_folder, "good", source + "\nhooks = Hooks()\n", target="vericache_compressor_good:hooks")
    assert Registry().spec("good").name == "good"


def test_one_module_may_serve_several_entry_points(plugin_folder: Path) -> None:
    source = plugin("one").replace("[spec('one')]", "(spec(n) for n in ('one', 'two'))")
    write_distribution(plugin_folder, "pair", {"one": "pair", "two": "pair"}, {"pair": source})
    registry = Registry()
    assert (registry.spec("one").name, registry.spec("two").name) == ("one", "two")


HALF_WAY = "yield spec('half-then-raises'); raise RuntimeError('half way')"
BROKEN: dict[str, tuple[str, str]] = {
    "import-error": ("raise ImportError('no such luck')", "no such luck"),
    "system-exit": ("import sys; sys.exit(3)", "tried to exit the process"),
    "value-error": ("raise ValueError('boom')", "ValueError: boom"),
    "syntax-error": ("def (:", "SyntaxError"),
    "missing-dependency": ("import surely_not_installed_xyz", "dependency 'surely_not_installed_xyz' is missing"),
    "half-then-raises": (
        plugin("half-then-raises").replace("return [spec('half-then-raises')]", HALF_WAY),
        "half way",
    ),
    "registers-then-raises": (
        plugin("other")
        + "\nfrom vericache_core.plugins.registry import default_registry\n"
        + "default_registry().register(spec('stowaway'))\nraise RuntimeError('after registering')\n",
        "after registering",
    ),
    "missing-hook": ("x = 1", "has no vericache_compressors hook"),
    "undecorated": (plugin("undecorated").replace("@hookimpl", ""), "has no vericache_compressors hook"),
    "misspelt-hook": (plugin("misspelt-hook").replace("def vericache_compressors", "def vericache_compressor"), "unknown hook"),
    "name-mismatch": (plugin("another-name"), "describes no compressor of that name"),
    "no-list": (plugin("no-list").replace("[spec('no-list')]", "spec('no-list')"), "must return a list"),
    "no-specs": (plugin("no-specs").replace("[spec('no-specs')]", "['no-specs']"), "expected a CompressorSpec"),
    "twice": (plugin("twice").replace("[spec('twice')]", "[spec('twice'), spec('twice')]"), "twice"),
    "mutable-options": (plugin("mutable-options").replace('Options, "token', 'dict, "token'), "must be a dataclass type"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_fails_alone_with_its_reason_and_leaves_nothing(name: str, plugin_folder: Path) -> None:
    source, reason = BROKEN[name]
    install(plugin_folder, name, source)
    install(plugin_folder, "good")
    with isolated_registry(discover=True) as registry:
        for _ in range(2):  # the second failure is as clear as the first
            with pytest.raises(PluginLoadError, match=reason) as caught:
                registry.spec(name)
            if "CompressorSpec" not in str(caught.value) and "mutable" not in name:
                assert f"vericache-compressor-{name} 0.1" in str(caught.value)
        assert registry.spec("good").name == "good"
        assert f"vericache_compressor_{name.replace('-', '_')}" not in sys.modules
        assert "stowaway" not in registry.names()
        failed = next(info for info in registry.list_plugins() if info.name == name)
        assert failed.status == "failed"
        assert failed.reason


def test_a_failed_load_works_after_the_plugin_is_mended(plugin_folder: Path) -> None:
    install(plugin_folder, "late", "import vericache_compressor_late_part\n" + plugin("late"))
    registry = Registry()
    with pytest.raises(PluginLoadError, match="dependency"):
        registry.spec("late")
    (plugin_folder / "vericache_compressor_late_part.py").write_text("x = 1\n")
    assert registry.spec("late").name == "late"
    assert statuses(registry)["late"] == "ok"


def test_a_missing_package_is_told_from_its_missing_dependency(plugin_folder: Path) -> None:
    write_distribution(plugin_folder, "ghost-dist", {"ghost": "ghost_pkg.inner"})
    with pytest.raises(PluginLoadError, match="its package 'ghost_pkg' is not there") as caught:
        Registry().spec("ghost")
    assert caught.value.hint == "try: pip install --force-reinstall ghost-dist"


def test_keyboard_interrupt_is_the_users_and_passes(plugin_folder: Path) -> None:
    install(plugin_folder, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry().spec("slow")


def test_strict_lets_the_plugins_own_exception_through(plugin_folder: Path) -> None:
    install(plugin_folder, "broken", "raise ZeroDivisionError")
    registry = Registry.from_env({"VERICACHE_STRICT_PLUGINS": "1"})
    with pytest.raises(ZeroDivisionError):
        registry.spec("broken")


@pytest.mark.parametrize(("version", "who"), [(API_VERSION + 1, "vericache"), (API_VERSION + 7, "vericache")])
def test_a_newer_api_version_is_refused_with_what_to_upgrade(version: int, who: str, plugin_folder: Path) -> None:
    install(plugin_folder, "future", plugin("future", api=version))
    with pytest.raises(ApiVersionError, match=f"API version {version}") as caught:
        Registry().spec("future")
    assert caught.value.hint == f"try: pip install --upgrade {who}"


def test_previous_api_version_is_accepted_and_older_refused(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vericache_core.plugins import loader

    monkeypatch.setattr(loader, "API_VERSION", 3)
    monkeypatch.setattr(loader, "SUPPORTED_API_VERSIONS", (2, 3))
    install(plugin_folder, "old", plugin("old", api=1))
    install(plugin_folder, "previous", plugin("previous", api=2))
    registry = Registry()
    assert registry.spec("previous").api_version == 2
    with pytest.raises(ApiVersionError) as caught:
        registry.spec("old")
    assert caught.value.hint == "try: pip install --upgrade vericache-compressor-old"


def test_threads_get_the_same_spec_from_one_import(plugin_folder: Path) -> None:
    install(
        plugin_folder,
        "good",
        "import time, builtins\nbuiltins.good_imports = getattr(builtins, 'good_imports', 0) + 1\ntime.sleep(0.05)\n"
        + plugin("good"),
    )
    registry, found = Registry(), []
    threads = [threading.Thread(target=lambda: found.append(registry.spec("good"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    import builtins

    assert builtins.__dict__.pop("good_imports") == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


# -- conflicts, names and switches -----------------------------------------------------------------------


def test_two_distributions_with_one_name_are_both_refused(plugin_folder: Path) -> None:
    install(plugin_folder, "same", distribution="dist-one")
    second = install(plugin_folder, "same", distribution="dist-two")
    install(plugin_folder, "good")
    registry = Registry()
    assert [info.status for info in registry.list_plugins() if info.name == "same"] == ["conflict", "conflict"]
    with pytest.raises(PluginConflictError, match=r"dist-one 0.1 and dist-two 0.1"):
        registry.spec("same")
    assert registry.spec("good").name == "good"
    assert Registry(disable=["Dist_Two"]).spec("same").factory.__module__ == "dist_one"
    shutil.rmtree(second)  # uninstalled while the process runs
    assert registry.spec("same").name == "same"


def test_a_plugin_cannot_take_the_name_of_a_builtin(plugin_folder: Path) -> None:
    install(plugin_folder, "identity")
    registry = Registry()
    with pytest.raises(PluginConflictError, match="vericache-compressor-identity"):
        registry.spec("identity")
    assert Registry(allow=[]).spec("identity").name == "identity"


def test_the_same_distribution_twice_on_the_path_is_no_conflict(plugin_folder: Path, tmp_path: Path) -> None:
    install(plugin_folder, "good")
    again = tmp_path / "again"
    write_distribution(again, "Vericache_Compressor.good", {"good": "vericache_compressor_good"})
    sys.path.append(str(again))
    try:
        assert statuses(Registry())["good"] == "ok?"
    finally:
        sys.path.remove(str(again))


@pytest.mark.parametrize("typo", ["snpkv", "snapvk", "xnapkv", "SNAPKV", "snap-kv"])
def test_an_unknown_name_suggests_the_nearest_and_a_package(typo: str, plugin_folder: Path) -> None:
    install(plugin_folder, "snapkv")
    with pytest.raises(UnknownCompressorError) as caught:
        Registry().spec(typo)
    assert caught.value.hint is not None
    assert "did you mean 'snapkv'?" in caught.value.hint
    assert "installed: adversarial, identity, random, snapkv" in caught.value.hint
    assert ("try: pip install vericache-compressor-" in caught.value.hint) == typo.islower()


def test_a_package_installed_later_is_found(plugin_folder: Path) -> None:
    registry = Registry()
    with pytest.raises(UnknownCompressorError):
        registry.spec("good")
    install(plugin_folder, "good")
    assert registry.spec("good").name == "good"


def test_disabled_names_are_refused_and_shown_apart(plugin_folder: Path) -> None:
    install(plugin_folder, "good")
    install(plugin_folder, "other")
    registry = Registry(disable=["good"])
    assert statuses(registry) == {"good": "disabled", "other": "ok?"}
    with pytest.raises(UnknownCompressorError, match="installed but disabled"):
        registry.spec("good")
    with pytest.raises(UnknownCompressorError) as caught:
        registry.spec("nothing-like-it")
    assert "disabled: good" in str(caught.value)


def test_the_environment_names_the_plugins_that_are_allowed(plugin_folder: Path) -> None:
    install(plugin_folder, "good")
    install(plugin_folder, "other")
    some, none = Registry.from_env({"VERICACHE_PLUGINS": "good, x"}), Registry.from_env({"VERICACHE_PLUGINS": ""})
    assert statuses(some) == {"good": "ok?", "other": "disabled"}
    assert statuses(none) == {"good": "disabled", "other": "disabled"}
    assert none.names() == sorted(BUILTINS)
    assert statuses(Registry.from_env({}, no_plugins=True)) == {}


def test_tracing_shows_loads_and_hook_calls(plugin_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(plugin_folder, "good")
    Registry.from_env({"VERICACHE_TRACE_PLUGINS": "1"}).spec("good")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "vericache: trace: load 'good' from vericache_compressor_good" in captured.err
    assert "call vericache_compressors()" in captured.err


# -- in process ------------------------------------------------------------------------------------------


def test_registering_in_process(plugin_folder: Path) -> None:
    install(plugin_folder, "good")
    registry, spec = Registry(), in_process("mine")
    assert registry.register(spec) is spec
    assert registry.register(spec) is spec
    assert registry.spec("mine") is spec
    assert next(info for info in registry.list_plugins() if info.name == "mine").status == "ok"
    for taken in ("mine", "good", "identity"):
        with pytest.raises(PluginConflictError, match="already taken"):
            registry.register(in_process(taken, factory=object))
    registry.freeze()
    with pytest.raises(UsageError, match="frozen"):
        registry.register(in_process("too-late"))
    assert registry.spec("good").name == "good"


def test_without_disables_more_and_keeps_the_rest(plugin_folder: Path) -> None:
    install(plugin_folder, "good")
    install(plugin_folder, "other")
    registry = Registry(disable=["other"])
    registry.register(in_process("mine"))
    registry.register(in_process("yours"))
    assert registry.without([]) is registry
    assert registry.without(["other"]) is registry
    less = registry.without(["good", "yours", "random"])
    assert less.names() == ["adversarial", "identity", "mine"]
    assert registry.names() == ["adversarial", "good", "identity", "mine", "random", "yours"]


def test_a_factory_that_fails_or_returns_no_compressor() -> None:
    def explode(options: Any) -> Any:
        raise ZeroDivisionError("in the factory")

    registry = Registry(discover=False)
    registry.register(in_process("explodes", explode))
    registry.register(in_process("empty", lambda options: None))
    with pytest.raises(CompressorFault, match="could not be built"):
        registry.create("explodes")
    with pytest.raises(CompressorFault, match="no compress"):
        registry.create("empty")


def test_isolated_registry_restores_the_default_one() -> None:
    with isolated_registry() as outer:
        assert default_registry() is outer
        with isolated_registry(in_process("mine")) as inner:
            assert default_registry() is inner
            assert "mine" in inner.names()
        assert default_registry() is outer


def test_default_registry_is_made_once() -> None:
    previous = set_default_registry(None)
    try:
        assert default_registry() is default_registry()
    finally:
        set_default_registry(previous)
