"""Load one plugin in isolation: whatever it does, the outcome is its specs or one typed error.

Nothing is shared between two loads. Each has its own pluggy manager, and a load that fails leaves no
module of the plugin behind, so a later try starts afresh.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from vericache_core.errors import ApiVersionError, PluginLoadError, VeriCacheError
from vericache_core.plugins import hooks
from vericache_core.plugins.discovery import CORE_DISTRIBUTION, Candidate
from vericache_core.plugins.spec import API_VERSION, SUPPORTED_API_VERSIONS, CompressorSpec

log = logging.getLogger("vericache.plugins")
Tracer = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin that loaded: the spec asked for, and its manager for the optional hooks."""

    candidate: Candidate
    spec: CompressorSpec
    manager: pluggy.PluginManager


def load(candidate: Candidate, *, strict: bool = False, trace: Tracer | None = None) -> LoadedPlugin:
    """Import the plugin of ``candidate`` and collect its spec.

    Raises PluginLoadError or ApiVersionError. With ``strict`` the plugin's own exception comes through.
    KeyboardInterrupt always comes through: it is the user's, not the plugin's.
    """
    before = set(sys.modules)
    try:
        return _load(candidate, trace)
    except (Exception, SystemExit) as error:
        _forget_modules(candidate, before)
        if strict or isinstance(error, VeriCacheError):
            raise
        raise _explain(candidate, error) from error


def _load(candidate: Candidate, trace: Tracer | None) -> LoadedPlugin:
    if trace:
        trace(f"load {candidate.name!r} from {candidate.entry_point.value} ({candidate.title})")
    importlib.invalidate_caches()  # a plugin that was repaired a moment ago must be seen
    target = candidate.entry_point.load()
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    if trace:
        manager.add_hookcall_monitoring(*_monitors(trace))
    manager.register(target, name=candidate.name)
    manager.check_pending()
    if not manager.hook.vericache_compressors.get_hookimpls():
        raise PluginLoadError(
            f"plugin {candidate.name!r} ({candidate.title}) has no vericache_compressors hook",
            cause=f"looked in {candidate.entry_point.value}",
            hint="decorate the function with @vericache_core.hookimpl",
        )
    specs = _collect(candidate, manager.hook.vericache_compressors())
    spec = specs.get(candidate.name)
    if spec is None:
        raise PluginLoadError(
            f"entry point {candidate.name!r} ({candidate.title}) describes no compressor of that name",
            cause=f"it describes {', '.join(map(repr, specs)) or 'none'}",
            hint="the entry-point name and CompressorSpec.name must be equal",
        )
    _check_api(candidate, spec)
    return LoadedPlugin(candidate, spec, manager)


def _collect(candidate: Candidate, results: Iterable[Any]) -> dict[str, CompressorSpec]:
    """Return the specs by name. A hook may be a generator, so reading the results may raise too."""
    specs: dict[str, CompressorSpec] = {}
    for result in results:
        if isinstance(result, CompressorSpec) or not isinstance(result, Iterable):
            raise PluginLoadError(
                f"plugin {candidate.name!r} ({candidate.title}): vericache_compressors must return a list of "
                f"CompressorSpec, got {type(result).__name__}"
            )
        for spec in result:
            if not isinstance(spec, CompressorSpec):
                raise PluginLoadError(f"plugin {candidate.name!r} ({candidate.title}): expected a CompressorSpec, got {spec!r}")
            if spec.name in specs:
                raise PluginLoadError(f"plugin {candidate.name!r} ({candidate.title}) describes {spec.name!r} twice")
            specs[spec.name] = spec
    return specs


def _check_api(candidate: Candidate, spec: CompressorSpec) -> None:
    if spec.api_version in SUPPORTED_API_VERSIONS:
        return
    newer = spec.api_version > API_VERSION
    spoken = " and ".join(map(str, SUPPORTED_API_VERSIONS))
    raise ApiVersionError(
        f"compressor {spec.name!r} ({candidate.title}) was written for API version {spec.api_version}; "
        f"this {CORE_DISTRIBUTION} accepts {spoken}",
        hint=f"try: pip install --upgrade {CORE_DISTRIBUTION if newer else candidate.distribution}",
    )


def _forget_modules(candidate: Candidate, before: set[str]) -> None:
    """Drop what a failed load imported of the plugin, or a second try would find the half-built modules."""
    root = candidate.entry_point.module.partition(".")[0]
    if root != __name__.partition(".")[0]:
        for name in set(sys.modules) - before:
            if name == root or name.startswith(root + "."):
                del sys.modules[name]


def _explain(candidate: Candidate, error: BaseException) -> PluginLoadError:
    """Say what went wrong, telling a missing plugin from a plugin that misses something."""
    label = f"compressor {candidate.name!r} ({candidate.title})"
    module = candidate.entry_point.module
    if isinstance(error, ModuleNotFoundError) and error.name:
        if module == error.name or module.startswith(error.name + "."):
            return PluginLoadError(
                f"{label} is registered, but its package {error.name!r} is not there",
                hint=f"try: pip install --force-reinstall {candidate.distribution}",
            )
        return PluginLoadError(
            f"{label} is installed, but its dependency {error.name!r} is missing",
            hint=f"try: pip install {error.name.partition('.')[0]}",
        )
    if isinstance(error, SystemExit):
        return PluginLoadError(f"{label} tried to exit the process while loading", cause=f"SystemExit: {error.code}")
    return PluginLoadError(f"{label} could not be loaded", cause=f"{type(error).__name__}: {error}")


def _monitors(trace: Tracer) -> tuple[Callable[..., None], Callable[..., None]]:
    # pluggy passes all of these by position
    def before(hook_name: str, _impls: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        trace(f"call {hook_name}({', '.join(f'{key}={value!r}' for key, value in kwargs.items())})")

    def after(outcome: Any, hook_name: str, _impls: Iterable[Any], _kwargs: Mapping[str, Any]) -> None:
        trace(f"done {hook_name}: {outcome.exception!r}" if outcome.exception else f"done {hook_name}")

    return before, after
