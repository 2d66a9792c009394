"""The registry: names in, compressors out.

Listing reads package metadata and imports nothing. A plugin is loaded when its name is first used, alone,
and its failure is the failure of that name only. Two plugins that claim one name are both refused, because
letting one win silently would make results depend on the order of installation.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vericache_core.errors import (
    CompressorFault,
    PluginConflictError,
    PluginLoadError,
    UnknownCompressorError,
    UsageError,
    VeriCacheError,
)
from vericache_core.plugins import complaints, discovery
from vericache_core.plugins.composed import ComposedOptions, composed_spec, is_composed, parts_of, split_options
from vericache_core.plugins.discovery import Candidate, canonical
from vericache_core.plugins.info import PluginInfo
from vericache_core.plugins.options import parse_options
from vericache_core.plugins.passport import Conformance, standing_of
from vericache_core.plugins.spec import CompressorSpec, is_valid_name

if TYPE_CHECKING:
    from vericache_core.compressor import Compressor
    from vericache_core.plugins.loader import LoadedPlugin


class Registry:
    """Finds, loads and builds compressors by name. Safe to use from several threads.

    Args:
        allow: names of plugins that may be used; None for all. Compressors of the core are not plugins.
        disable: names of compressors or of distributions that may not be used.
        strict: let a plugin's own exception through instead of wrapping it.
        trace: called with a line of text at each load and hook call.
        discover: look at installed packages; off in tests and under ``--no-plugins``.
    """

    def __init__(
        self,
        *,
        allow: Iterable[str] | None = None,
        disable: Iterable[str] = (),
        strict: bool = False,
        trace: Callable[[str], None] | None = None,
        discover: bool = True,
    ) -> None:
        self._allow = None if allow is None else frozenset(allow)
        self._disable = frozenset(disable)
        self._strict, self._trace, self._discover = strict, trace, discover
        # Reentrant: a plugin may use the registry while it is being loaded.
        self._lock = threading.RLock()
        self._installed: list[Candidate] | None = None
        self._registered: dict[str, CompressorSpec] = {}
        self._loaded: dict[str, LoadedPlugin] = {}
        self._failures: dict[str, str] = {}
        self._frozen = False

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, *, disable: Iterable[str] = (), no_plugins: bool = False
    ) -> Registry:
        """Build a registry that obeys the environment.

        ``VERICACHE_PLUGINS=a,b`` allows only those plugins (empty: none); ``VERICACHE_STRICT_PLUGINS=1`` lets a
        plugin's exception through; ``VERICACHE_TRACE_PLUGINS=1`` writes loads and hook calls to stderr.
        """
        env = os.environ if env is None else env
        allowed = env.get("VERICACHE_PLUGINS")
        return cls(
            allow=None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()],
            disable=disable,
            strict=_is_set(env, "VERICACHE_STRICT_PLUGINS"),
            trace=_trace_to_stderr if _is_set(env, "VERICACHE_TRACE_PLUGINS") else None,
            discover=not no_plugins,
        )

    def without(self, disable: Iterable[str]) -> Registry:
        """Return a registry like this one that also disables some names; this one when there are none.

        In-process specs carry over unless they are disabled; plugins load anew (their modules do not).
        """
        names = frozenset(disable)
        if names <= self._disable:
            return self
        other = Registry(
            allow=self._allow,
            disable=self._disable | names,
            strict=self._strict,
            trace=self._trace,
            discover=self._discover,
        )
        other._registered = {name: spec for name, spec in self._registered.items() if name not in names}
        other._frozen = self._frozen
        return other

    # -- listing ---------------------------------------------------------------------------------

    def list_plugins(self) -> list[PluginInfo]:
        """Return one entry per claim on a name, sorted by name; imports nothing."""
        with self._lock:
            groups = discovery.group_by_name(filter(self._enabled, self._candidates()))
            found = [
                PluginInfo(spec.name, "(in process)", "", "ok", self.origin(spec.name), spec.summary)
                for spec in self._registered.values()
            ]
            for candidate in self._candidates():
                reason = self._disabled_by(candidate)
                status = "disabled" if reason else discovery.status_of(groups[candidate.name])
                if status in ("ok", "ok?") and candidate.name in self._failures:
                    status, reason = "failed", self._failures[candidate.name]
                elif status == "ok?" and candidate.name in self._loaded:
                    status = "ok"
                found.append(PluginInfo.of(candidate, status, reason))
        return sorted(found, key=lambda info: (info.name, info.distribution))

    def names(self) -> list[str]:
        """Return the names that may be used, sorted, without importing anything; some may fail to load."""
        return sorted({info.name for info in self.list_plugins() if info.status in ("ok", "ok?", "failed")})

    def refresh(self) -> None:
        """Forget what was read from package metadata and which loads failed; what is loaded stays loaded."""
        with self._lock:
            self._installed = None
            self._failures.clear()

    # -- use -------------------------------------------------------------------------------------

    def spec(self, name: str) -> CompressorSpec:
        """Return the descriptor of a compressor, loading its plugin on first use.

        Raises UnknownCompressorError, PluginConflictError, PluginLoadError or ApiVersionError.
        A failed load is tried again the next time. The descriptor of a composed name is derived from its parts.
        """
        if is_composed(name):
            return composed_spec(name, [self.spec(part) for part in parts_of(name)], lambda options: self.create(name, options))
        with self._lock:
            if name in self._registered:
                return self._registered[name]
            return self._plugin(name).spec

    def create(self, name: str, options: Any = None) -> Compressor:
        """Build a compressor from a mapping of options (strings are fine) or an instance of its options type.

        A composed name, ``"dropper+quantizer"``, builds both and chains them; see ``plugins.composed`` for options.
        """
        if is_composed(name):
            return self._create_chain(name, {} if options is None else options)
        spec = self.spec(name)
        given = {} if options is None else options
        parsed = given if isinstance(given, spec.options) else parse_options(spec.options, given)
        try:
            built = spec.factory(parsed)
        except VeriCacheError:
            raise
        except Exception as error:
            if self._strict:
                raise
            cause = f"{type(error).__name__}: {error}"
            raise CompressorFault(f"compressor {name!r} could not be built", cause=cause) from error
        if not callable(getattr(built, "compress", None)):
            raise CompressorFault(f"factory of {name!r} returned {type(built).__name__}, which has no compress()")
        return built

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise as `create` would for an unknown name or a bad option, without building anything."""
        parts = parts_of(name) if is_composed(name) else (name,)
        each = split_options(parts, options) if is_composed(name) else [dict(options)]
        for part, own in zip(parts, each, strict=True):
            parse_options(self.spec(part).options, own)

    def origin(self, name: str) -> str:
        """Return where a compressor is written, as ``file:line``, or its factory's name when that is unknown."""
        if is_composed(name):
            return " + ".join(map(self.origin, parts_of(name)))
        factory: Any = self.spec(name).factory
        try:
            return f"{inspect.getsourcefile(factory)}:{inspect.getsourcelines(factory)[1]}"
        except (TypeError, OSError):  # a partial, a callable object, or no source on disk
            return str(getattr(factory, "__qualname__", factory))

    def conformance_options(self, name: str) -> list[dict[str, Any]]:
        """Return the further option sets that the plugin asks the conformance suite to test.

        Those of a composed name are those of each part, by address, while the other keeps its defaults.
        """
        if is_composed(name):
            return [
                {f"{part.replace('-', '_')}.{key}": value for key, value in options.items()}
                for part in parts_of(name)
                for options in self.conformance_options(part)
            ]
        results = self._optional_hook(name, "vericache_conformance_options")
        return [dict(options) for result in results for options in result]

    def expected_failures(self, name: str) -> dict[str, str]:
        """Return the conformance checks that the plugin says it fails, each with a reason; none for a composed name."""
        if is_composed(name):
            return {}
        merged: dict[str, str] = {}
        for result in self._optional_hook(name, "vericache_expected_failures"):
            merged.update(result)
        return merged

    def conformance(self, name: str) -> Conformance:
        """Return what the conformance passport of a compressor says; nothing of the plugin is imported.

        A compressor that was registered in this process, or whose name is in conflict, is ``unverified``.
        A composed one stands as the worse of its parts.
        """
        if is_composed(name):
            standings = [self.conformance(part) for part in parts_of(name)]
            return next((found for found in standings if found.standing != "conformant"), standings[0])
        with self._lock:
            if name in self._registered:
                return Conformance("unverified", "registered in this process")
            claims = self._claims(name)
        if len(claims) != 1:
            return Conformance("unverified", "no single installed plugin has this name")
        return standing_of(name, claims[0].entry_point.module, claims[0].version)

    # -- in-process registration -------------------------------------------------------------------

    def register(self, spec: CompressorSpec) -> CompressorSpec:
        """Make a compressor known without a package (tests, notebooks) and return its spec.

        The same spec again is fine; another one under a taken name raises PluginConflictError.
        """
        with self._lock:
            if self._frozen:
                raise UsageError(f"cannot register {spec.name!r}: the registry is frozen")
            if self._registered.get(spec.name) == spec:
                return spec
            claims = [candidate.title for candidate in self._claims(spec.name)]
            if claims or spec.name in self._registered:
                owner = claims[0] if claims else "another spec registered in this process"
                raise PluginConflictError(f"compressor name {spec.name!r} is already taken by {owner}")
            self._registered[spec.name] = spec
            return spec

    def freeze(self) -> None:
        """Refuse further `register` calls; plugins still load on first use."""
        self._frozen = True

    # -- inside ------------------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        if self._installed is None:
            self._installed = discovery.installed_candidates() if self._discover else []
        return [*discovery.builtin_candidates(), *self._installed]

    def _claims(self, name: str) -> list[Candidate]:
        return [candidate for candidate in self._candidates() if candidate.name == name and self._enabled(candidate)]

    def _enabled(self, candidate: Candidate) -> bool:
        return not self._disabled_by(candidate)

    def _disabled_by(self, candidate: Candidate) -> str:
        """Return what switched a candidate off, or an empty string."""
        # By distribution too, because that is the way out of a conflict.
        if candidate.name in self._disable or (
            not candidate.builtin and canonical(candidate.distribution) in map(canonical, self._disable)
        ):
            return "in the list of disabled plugins"
        if self._allow is not None and not candidate.builtin and candidate.name not in self._allow:
            return "not in VERICACHE_PLUGINS"
        return ""

    def _plugin(self, name: str) -> LoadedPlugin:
        """Return a plugin, loaded if need be. The caller holds the lock."""
        if name in self._loaded:
            return self._loaded[name]
        claims = self._claims(name)
        if len(claims) != 1:  # packages may have come or gone since the metadata was read
            self.refresh()
            claims = self._claims(name)
        if not claims or not is_valid_name(name):
            raise self._unknown(name)
        if len(claims) > 1:
            raise complaints.conflict(name, claims)
        return self._load(claims[0])

    def _load(self, candidate: Candidate) -> LoadedPlugin:
        from vericache_core.plugins.loader import load  # pluggy is imported only when something is loaded

        registered = dict(self._registered)
        try:
            loaded = load(candidate, strict=self._strict, trace=self._trace)
        except BaseException as error:
            self._registered = registered  # a plugin that fails half way leaves no trace
            self._failures[candidate.name] = str(error)
            raise
        self._failures.pop(candidate.name, None)
        self._loaded[candidate.name] = loaded
        return loaded

    def _create_chain(self, name: str, options: Any) -> Compressor:
        from vericache_core.chain import ChainCompressor  # it needs torch, which listing does not

        self.spec(name)  # refuses parts in the wrong place before one of them is built
        first, last = parts_of(name)
        own = options.parts if isinstance(options, ComposedOptions) else split_options((first, last), options)
        return ChainCompressor(self.create(first, own[0]), self.create(last, own[1]))

    def _optional_hook(self, name: str, hook: str) -> list[Any]:
        with self._lock:
            if name in self._registered:
                return []
            plugin = self._plugin(name)
        try:
            results = getattr(plugin.manager.hook, hook)(name=name)
            return [result if isinstance(result, Mapping) else tuple(result) for result in results]
        except (Exception, SystemExit) as error:
            if self._strict:
                raise
            cause = f"{type(error).__name__}: {error}"
            raise PluginLoadError(f"{hook} of {plugin.candidate.title} failed", cause=cause) from error

    def _unknown(self, name: str) -> UnknownCompressorError:
        off = {candidate.name: reason for candidate in self._candidates() if (reason := self._disabled_by(candidate))}
        return complaints.unknown_compressor(name, self.names(), off)


def _is_set(env: Mapping[str, str], key: str) -> bool:
    return env.get(key, "").strip().lower() not in ("", "0", "false", "no")


def _trace_to_stderr(line: str) -> None:
    sys.stderr.write(f"vericache: trace: {line}\n")


_default: Registry | None = None
_default_lock = threading.Lock()


def default_registry() -> Registry:
    """Return the registry of this process, built from the environment on first use."""
    global _default  # noqa: PLW0603  # one registry per process is the point
    with _default_lock:
        if _default is None:
            _default = Registry.from_env()
        return _default


def set_default_registry(registry: Registry | None) -> Registry | None:
    """Replace the registry of this process (None: build anew on next use) and return the old one."""
    global _default
    with _default_lock:
        previous, _default = _default, registry
        return previous
