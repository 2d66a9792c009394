"""The descriptor of one compressor: what a plugin registers. Imports neither torch nor pluggy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from vericache_core.errors import PluginLoadError
from vericache_core.plugins.fields import did_you_mean, option_fields

if TYPE_CHECKING:
    from vericache_core.compressor import Compressor

API_VERSION: Final = 1
"""Version of the plugin contract. It moves apart from the version of the distribution."""

SUPPORTED_API_VERSIONS: Final = tuple(version for version in (API_VERSION - 1, API_VERSION) if version >= 1)
"""Contract versions that this core accepts: the current one and the one before."""

NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Grammar of a compressor's name: lower-case words joined by single hyphens."""

Kind = Literal["token-drop", "quantization", "hybrid"]
Support = Literal["yes", "no", "unknown"]

CAPABILITIES: Final[Mapping[str, tuple[Support, str]]] = MappingProxyType(
    {
        "sliding_window": ("no", "compresses sliding-window layers; without it they stay uncompressed"),
        "ragged_heads": ("unknown", "KV heads of one layer may keep different numbers of tokens"),
        "extend": ("unknown", "folds verified tail rows into the compressed region"),
        "rollback": ("unknown", "drops the newest tokens exactly"),
        "residual": ("unknown", "names the rows that are missing to rebuild the full KV"),
        "partial_rotary": ("unknown", "works when only part of head_dim is rotated"),
        "nonfinite_input": ("unknown", "refuses NaN and infinity in the prefix with a typed error"),
    }
)
"""Every capability: what is assumed when a spec does not mention it, and what it means."""


def is_valid_name(name: object) -> bool:
    """Say whether ``name`` may be the name of a compressor."""
    return isinstance(name, str) and NAME_PATTERN.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """Frozen description of one compressor.

    Attributes:
        name: the name users put in their configuration; equal to the entry-point name.
        factory: builds the compressor from an instance of ``options``; called once per use, must be cheap.
        options: a frozen dataclass type, every field with a default (see ``vericache_core.plugins.options``).
        kind: what the method does to the cache.
        api_version: the contract version that the plugin was written for; write the number, not the constant.
        summary: one line for listings.
        capabilities: ``yes``, ``no`` or ``unknown`` per name in `CAPABILITIES`; ``unknown`` means "run the check".
    """

    name: str
    factory: Callable[[Any], Compressor]
    options: type[Any]
    kind: Kind
    api_version: int
    summary: str = ""
    # Not hashed: a mapping has no hash, and name and factory already tell specs apart.
    capabilities: Mapping[str, Support] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self._well_named():
            raise PluginLoadError(
                f"{self.name!r} is not a compressor name",
                hint="use lower-case words joined by single hyphens, such as 'snapkv' or 'my-method'",
            )
        if not callable(self.factory):
            raise self._bad(f"factory must be callable, got {self.factory!r}")
        if self.kind not in get_args(Kind):
            raise self._bad(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        # Plugins need not be type-checked, so what the annotations promise is tested here.
        version: Any = self.api_version
        if type(version) is not int or version < 1:
            raise self._bad(f"api_version must be a positive integer, got {version!r}")
        summary: Any = self.summary
        if not isinstance(summary, str) or "\n" in summary:
            raise self._bad("summary must be one line of text")
        try:
            option_fields(self.options)
        except Exception as error:  # resolving annotations runs a plugin's own names: anything may be raised
            raise self._bad(f"options cannot be used: {error}") from error
        # A read-only copy: a plugin that keeps the dict cannot change its mind later.
        object.__setattr__(self, "capabilities", MappingProxyType(self._checked_capabilities()))

    def _well_named(self) -> bool:
        return is_valid_name(self.name)

    def _checked_capabilities(self) -> dict[str, Support]:
        for name, value in self.capabilities.items():
            if name not in CAPABILITIES:
                near = did_you_mean(name, CAPABILITIES)
                suffix = f"; did you mean {near!r}?" if near else ""
                raise self._bad(f"unknown capability {name!r}{suffix}", hint=f"known: {', '.join(CAPABILITIES)}")
            if value not in get_args(Support):
                raise self._bad(f"capability {name!r} must be yes, no or unknown, got {value!r}")
        return dict(self.capabilities)

    def _bad(self, problem: str, hint: str | None = None) -> PluginLoadError:
        return PluginLoadError(f"compressor {self.name!r}: {problem}", hint=hint)

    def capability(self, name: str) -> Support:
        """Return what this compressor says about a capability, or what is assumed when it says nothing."""
        return self.capabilities.get(name, CAPABILITIES[name][0])
