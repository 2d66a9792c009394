"""Compressors attached to one model: made by name for each request, and refused before it runs if they cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vericache_core.compressor import Compressor
from vericache_core.config import EngineConfig
from vericache_core.errors import CompressorFault, ConformanceRequiredError, VeriCacheError, describe
from vericache_core.kv import LayerDescriptor
from vericache_core.plugins.registry import Registry


class Compressors:
    """Every request gets a compressor of its own, so that no state can leak between them.

    Args:
        registry: where names are looked for; those that the configuration disables are not found.
        config: which compressor is the configured one, its options, and whether it has to be conformant.
        layers: of the model.
    """

    def __init__(self, registry: Registry, config: EngineConfig, layers: Sequence[LayerDescriptor]) -> None:
        self._registry = registry.without(config.disable_plugins)
        self._config, self._layers = config, layers

    def configured(self, name: str) -> Compressor:
        """``name`` with the configured options, if it is the configured compressor, and else with its defaults.

        Raises:
            UnknownCompressorError, OptionError, ConformanceRequiredError, CompressorFault: it cannot be had.
        """
        return self.make(name, self._config.options_of(name))

    def make(self, name: str, options: Mapping[str, Any]) -> Compressor:
        """``name`` with ``options``.

        Raises:
            UnknownCompressorError, OptionError, ConformanceRequiredError, CompressorFault: it cannot be had.
        """
        if self._config.require_conformant:
            self._require_conformant(name)
        compressor = self._registry.create(name, options)
        check = getattr(compressor, "check_layers", None)
        try:
            if callable(check):  # part of the bases, not of the protocol
                check(self._layers)
            _ = compressor.needs, [compressor.supports(layer) for layer in self._layers]
        except VeriCacheError:
            raise
        except Exception as error:
            raise CompressorFault(f"compressor {name!r} failed when it was attached", cause=describe(error)) from error
        return compressor

    def _require_conformant(self, name: str) -> None:
        standing = self._registry.conformance(name)
        if standing.standing != "conformant":
            raise ConformanceRequiredError(
                f"compressor {name!r} is {standing.standing}, and require_conformant is set",
                cause=standing.detail,
                hint=f"vericache-conform run {name} --passport",
            )
