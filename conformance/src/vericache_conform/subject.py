"""The compressor under test, by a reference that another process can follow too.

A reference is the name of an installed compressor (``snapkv``) or composition (``snapkv+kivi``), an object in a module
(``package.module:SPEC``), or one of the suite's own broken compressors (``mutant:drops-window``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vericache_conform.expected import find_file
from vericache_core.compressor import Compressor
from vericache_core.errors import PluginLoadError, UsageError, VeriCacheError
from vericache_core.plugins.composed import is_composed, parts_of
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.spec import CompressorSpec

MUTANT = "mutant:"


@dataclass
class Subject:
    """One compressor under test.

    Attributes:
        name: of the compressor.
        registry: where it is found and built.
        ref: how another process finds it; None for an object that only this process has.
        options: options that the caller fixed; every option set of a check starts from them.
        distribution: the installed distribution it comes from, if any.
        expected_file: a conformance.toml that is used instead of the plugin's own.
        memo: results that several checks of one run share.
    """

    name: str
    registry: Registry
    ref: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str | None = None
    expected_file: Path | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> CompressorSpec:
        return self.registry.spec(self.name)

    @property
    def mutant(self) -> bool:
        return (self.ref or "").startswith(MUTANT)

    @property
    def parts(self) -> tuple[str, ...]:
        """The compressors that the name stands for: itself, or both of a composition."""
        return parts_of(self.name) if is_composed(self.name) else (self.name,)

    @property
    def distributions(self) -> list[str]:
        """Installed distributions that it comes from."""
        if not is_composed(self.name):
            return [] if self.distribution is None else [self.distribution]
        infos = self.registry.list_plugins()
        return [info.distribution for part in self.parts for info in infos if info.name == part]

    def create(self, options: Mapping[str, Any] | None = None) -> Compressor:
        """A compressor with these options over the fixed ones."""
        return self.registry.create(self.name, {**self.options, **(options or {})})

    def option_sets(self) -> list[dict[str, Any]]:
        """The defaults, then what the plugin asks to be tested; options that the caller fixed win."""
        sets: list[dict[str, Any]] = [{}]
        for extra in self.registry.conformance_options(self.name):
            given = {key: value for key, value in extra.items() if key not in self.options}
            if any(map(is_budget, self.options)):
                given = {key: value for key, value in given.items() if not is_budget(key)}
            if given not in sets:
                sets.append(given)
        return sets


def is_budget(option: str) -> bool:
    """Whether an option, or that option of a part (``snapkv.keep``), says how many tokens are kept."""
    return option.rpartition(".")[2] in ("keep", "keep_tokens")


def resolve(ref: str, options: Mapping[str, Any] | None = None) -> Subject:
    """Find a compressor by reference. An installed plugin is not loaded yet.

    Raises:
        UsageError: the reference is malformed, or the module has no such object.
    """
    if ref.startswith(MUTANT):
        from vericache_conform.mutants.catalogue import find_mutant

        mutant = find_mutant(ref.removeprefix(MUTANT))
        made = _of_spec(load_object(mutant.target), ref, {**mutant.options, **(options or {})})
        made.expected_file = mutant.expected_file
        return made
    if ":" in ref:
        return _of_spec(load_object(ref), ref, options)
    registry = Registry.from_env()
    claims = [info for info in registry.list_plugins() if info.name == ref]
    return Subject(ref, registry, ref, dict(options or {}), claims[0].distribution if claims else None)


def of_spec(spec: CompressorSpec, options: Mapping[str, Any] | None = None) -> Subject:
    """A subject for a descriptor in hand; other processes find it if a module holds it under a name."""
    module = getattr(spec.factory, "__module__", None)
    held = vars(sys.modules[module]) if module in sys.modules else {}
    names = [name for name, value in held.items() if value is spec]
    importable = module not in (None, "__main__") and bool(names) and _importable(str(module))
    return _of_spec(spec, f"{module}:{names[0]}" if importable else None, options)


def load_object(ref: str) -> CompressorSpec:
    """The descriptor that ``module:NAME`` names.

    Raises:
        UsageError: there is no such module, name or descriptor.
        PluginLoadError: the module raised while it was imported.
    """
    module, _, attribute = ref.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(f"{ref!r} names no module", cause=str(error)) from error
    except AttributeError as error:
        raise UsageError(f"{ref!r} names nothing", cause=str(error)) from error
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"{module} could not be imported", cause=f"{type(error).__name__}: {error}") from error
    if not isinstance(found, CompressorSpec):
        raise UsageError(f"{ref!r} is a {type(found).__name__}, not a CompressorSpec")
    return found


def _of_spec(spec: CompressorSpec, ref: str | None, options: Mapping[str, Any] | None) -> Subject:
    registry = Registry(discover=False)
    registry.register(spec)
    return Subject(spec.name, registry, ref, dict(options or {}))


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def source_file(subject: Subject) -> str | None:
    """The file that holds the compressor's factory, or None when there is none."""
    try:
        factory: Any = subject.spec.factory
        return inspect.getsourcefile(factory)
    except (VeriCacheError, TypeError, OSError):
        return None


def expectations_file(subject: Subject) -> Path | None:
    """The ``conformance.toml`` that applies: the one given, or the plugin's own."""
    if subject.expected_file is not None:
        return subject.expected_file
    # A composition is nobody's package: what its parts expect of themselves says nothing about it.
    return None if subject.mutant or len(subject.parts) > 1 else find_file(source_file(subject))


def version_of(subject: Subject) -> str:
    """Version of the distribution, empty when there is none."""
    if subject.distribution is None:
        return ""
    try:
        return importlib.metadata.version(subject.distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
