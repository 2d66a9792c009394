"""vLLM's CPU attention with a compressor in the layers of the draft model, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vericache_core import LayerDescriptor, QuantizationCompressor, default_registry
from vericache_core.errors import OptionError
from vericache_vllm.speculation import COMPRESSOR

DRAFT_PREFIX = "draft_model."
"""What vLLM's draft model calls its layers."""


class DraftAttentionBackend(CPUAttentionBackend):
    """The stock backend, unless the engine's ``additional_config`` names a compressor for drafts."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        stock: type[CPUAttentionBackendImpl] = CPUAttentionBackend.get_impl_cls()
        return DraftAttentionImpl if _asked() else stock


class DraftAttentionImpl(CPUAttentionBackendImpl):
    """Writes decoded codes in place of the draft's KV rows; the target's rows are written as ever."""

    def __init__(self, *arguments: Any, **further: Any) -> None:
        super().__init__(*arguments, **further)
        asked = _asked()
        self._compressor = build_quantizer(asked["name"], asked["options"])
        self._rounds: dict[str, RowQuantizer] = {}

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        name = str(layer.layer_name)
        if name.startswith(DRAFT_PREFIX):
            quantizer = self._rounds.get(name)
            if quantizer is None:
                descriptor = LayerDescriptor(
                    index=len(self._rounds),
                    kind="full",
                    heads=self.num_heads,
                    kv_heads=self.num_kv_heads,
                    head_dim=self.head_size,
                    value_dim=self.head_size,
                    dtype=key.dtype,
                    scaling=self.scale,
                )
                quantizer = self._rounds[name] = RowQuantizer(self._compressor, descriptor)
            key, value = quantizer.lossy(key, value)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class RowQuantizer:
    """Codes rows and decodes them at once.

    Args:
        compressor: codes every token alone.
        layer: what the rows belong to.

    Raises:
        OptionError: it codes several tokens together, or keeps new ones exact, so a row alone says nothing.
    """

    def __init__(self, compressor: QuantizationCompressor, layer: LayerDescriptor) -> None:
        self._codecs = (compressor.key_codec(layer), compressor.value_codec(layer))
        alone = all(codec.unit == 1 for codec in self._codecs)
        if not alone or compressor.key_boundary(1) != 1 or compressor.value_boundary(1) != 1:
            raise OptionError(
                f"{compressor.name!r} does not code every token alone",
                cause="vLLM writes rows one by one",
                hint="use a quantizer without groups of tokens and without a residual window",
            )

    def lossy(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(keys, values)`` ``[tokens, kv_heads, head_dim]`` as decoding gives them back, in their dtype."""
        decoded = []
        for rows, codec in zip((keys, values), self._codecs, strict=True):
            by_head = rows.transpose(0, 1).contiguous()
            decoded.append(codec.decode(codec.encode(by_head)).to(rows.dtype).transpose(0, 1).contiguous())
        return decoded[0], decoded[1]


def build_quantizer(name: str, options: Any) -> QuantizationCompressor:
    """A registered quantizer.

    Raises:
        OptionError: it is none.
    """
    built = default_registry().create(name, options)
    if not isinstance(built, QuantizationCompressor):
        raise OptionError(f"{name!r} is no quantizer", hint="vLLM's draft layers take quantizers only")
    return built


def _asked() -> Any:
    """``{"name", "options"}`` that the engine under construction was given, or ``None``."""
    config = get_current_vllm_config_or_none()
    further = None if config is None else config.additional_config
    return further.get(COMPRESSOR) if isinstance(further, dict) else None
