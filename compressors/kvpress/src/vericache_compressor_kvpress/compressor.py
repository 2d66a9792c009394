"""The compressor: a pass of the model in which a press scores tokens or drops them from a clone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vericache_compressor_kvpress.library import build_press, set_budget, shortest
from vericache_compressor_kvpress.options import KvpressOptions
from vericache_compressor_kvpress.repeats import read_twice, reconstructed
from vericache_compressor_kvpress.replay import LayerCall, replay
from vericache_compressor_kvpress.survivors import masked_survivors, matched_survivors
from vericache_compressor_kvpress.table import PREFIX, PRESSES
from vericache_core import CompressContext, CompressedKV, HeadMap, LayerDescriptor, Needs, PrefixView, TokenDropCompressor
from vericache_core.errors import CompressorFault, OptionError
from vericache_core.kv import CompressedLayer, PlainLayer


class KvpressCompressor(TokenDropCompressor):
    """Keeps what a press of kvpress keeps. The rows are those of the full KV, which no press ever sees.

    A press that scores only ranks: the SDK then spends the budget exactly, in float32, ties to the lower position,
    protected spans first. Any other press decides by itself, and protected spans are added to what it kept.

    The pass that the press looks at is a prefill of its own, in one piece, through the model's own attention. Its
    numbers may differ in the last bits from those of the full KV and between thread counts; where scores are close,
    so may the choice.

    A prompt shorter than the press accepts (its window or its sinks) survives whole, without a pass; so does none.

    Layers stay uncompressed that have a sliding window or whose keys are not rotated over their whole width: presses
    rotate queries again and know no other way. A press that runs the model again refuses models in which some
    layers are such and some are not.

    Raises:
        OptionError: ``compression_ratios`` by layer that are not as many as the model has layers, or a press that runs
            the model again and layers of which it knows only some.
        MissingDependencyError: kvpress is not installed.
        CompressorFault: the press fails on this model or prompt (kvpress's own message is the cause).
    """

    def __init__(self, press: str, options: KvpressOptions | None = None) -> None:
        super().__init__(options or KvpressOptions())
        self.press = press
        self.entry = PRESSES[press]
        # Built now, since a bad argument must not wait for the first prompt.
        self.shortest = shortest(build_press(press, self.options))

    @property
    def name(self) -> str:  # type: ignore[override]  # one class serves many names
        return PREFIX + self.press

    def supports(self, layer: LayerDescriptor) -> bool:
        return super().supports(layer) and layer.rotary_dim == layer.head_dim

    def check_layers(self, layers: Sequence[LayerDescriptor]) -> None:
        ratios = getattr(build_press(self.press, self.options), "compression_ratios", None)
        if self.entry.budget == "layers" and ratios and len(ratios) != len(layers):
            raise OptionError(f"{self.name}: {len(ratios)} compression_ratios for {len(layers)} layers")
        if self.entry.route in ("reconstruct", "replay"):
            unknown = [layer.index for layer in layers if not self.supports(layer)]
            if 0 < len(unknown) < len(layers):
                raise OptionError(
                    f"{self.name} reads every layer of the model at once, and does not know layer {unknown[0]}",
                    cause="it has a sliding window, or keys that are not rotated over their whole width",
                )

    @property
    def needs(self) -> Needs:
        return Needs(model=True)

    def scores(self, prefix: PrefixView, context: CompressContext) -> dict[int, Tensor]:
        """Scores of a press that ranks tokens: float32 ``[kv_heads, tokens]`` by layer; zeros if the prompt is too short."""
        if prefix.tokens < self.shortest:
            return {layer.index: torch.zeros(layer.kv_heads, prefix.tokens) for layer in prefix.layers if self.supports(layer)}
        found: dict[int, Tensor] = {}
        with self._pressing(prefix, context) as press:

            def see(index: int, call: LayerCall) -> None:
                score = press.score(call.module, call.hidden_states, call.keys, call.values, call.attentions, call.kwargs)
                found[index] = score[0].detach().float().cpu().clone()

            self._replay(prefix, context, see)
        return found

    def allocate(
        self, layers: Sequence[LayerDescriptor], scores: Sequence[Tensor], tokens: int, context: CompressContext
    ) -> list[list[int]]:
        if tokens < self.shortest:
            return [[tokens] * layer.kv_heads for layer in layers]
        return super().allocate(layers, scores, tokens, context)

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        if self.entry.route == "rank" or prefix.tokens < self.shortest:
            return super().compress(prefix, context)
        with self._pressing(prefix, context) as press:
            kept = self._dropped(press, prefix, context) if self.entry.route == "drop" else self._reread(press, prefix, context)
        layers: list[CompressedLayer | None] = [None] * len(prefix.layers)
        for layer in prefix.layers:
            if layer.index in kept:
                always = self.protected(layer, prefix.tokens, context)
                heads = [_with(head, always) for head in kept[layer.index]]
                layers[layer.index] = PlainLayer.gather(*prefix.rows(layer.index), HeadMap(heads, prefix.tokens))
        return self._wrap(prefix.tokens, prefix.layers, layers)

    def _dropped(self, press: Any, prefix: PrefixView, context: CompressContext) -> dict[int, list[Tensor]]:
        """What a press leaves of clones, layer by layer."""
        kept: dict[int, list[Tensor]] = {}

        def see(index: int, call: LayerCall) -> None:
            before = call.keys.clone()
            shadow = call.kwargs["past_key_values"].layers[index]
            call.module.masked_key_indices = None
            try:
                if self.entry.budget == "threshold" and "threshold" not in self.options.parsed_arguments():
                    press.threshold = self._threshold(press, call)
                press.forward_hook(call.module, [], call.kwargs, call.output)
            finally:
                masked = masked_survivors(call.module, before.shape[1], before.shape[2])
            kept[index] = matched_survivors(before, shadow.keys) if masked is None else masked

        self._replay(prefix, context, see)
        return kept

    def _reread(self, press: Any, prefix: PrefixView, context: CompressContext) -> dict[int, list[Tensor]]:
        """What a press keeps that runs the model again."""
        self.check_layers(prefix.layers)
        if not any(self.supports(layer) for layer in prefix.layers):
            return {}
        kept = self.options.kept_tokens(prefix.tokens)
        if self.entry.route == "replay":
            return read_twice(press, context.model(), prefix.token_ids, kept)
        start = next((stop for first, stop in context.protected if first == 0), 0)
        return reconstructed(press, context.model(), prefix.token_ids, start, context.encode, kept)

    def _threshold(self, press: Any, call: LayerCall) -> float:
        """The score below which the press drops as much of this layer as ``keep`` asks for, its window permitting."""
        scores = press.press.score(
            call.module, call.hidden_states, call.keys.clone(), call.values.clone(), call.attentions, call.kwargs
        )
        tokens = scores.shape[-1]
        free = scores[0, :, : max(0, tokens - press.sliding_window_size)].float().flatten().sort().values
        gone = scores.shape[1] * (tokens - self.options.kept_tokens(tokens))
        return float(free[gone]) if gone < len(free) else float("inf")

    def _replay(self, prefix: PrefixView, context: CompressContext, see: Any) -> None:
        layers = [layer.index for layer in prefix.layers if self.supports(layer)]
        if layers:
            replay(context.model(), prefix.token_ids, layers, see, eager=self.entry.eager)

    @contextmanager
    def _pressing(self, prefix: PrefixView, context: CompressContext) -> Iterator[Any]:
        """The press for this prompt; its failures get its name, its random numbers a seed."""
        press = build_press(self.press, self.options)
        set_budget(press, self.entry.budget, self.options.kept_tokens(prefix.tokens), prefix.tokens, len(prefix.layers))
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(self.options.seed)
                press.post_init_from_model(context.model())
                yield press
        except (CompressorFault, KeyboardInterrupt):
            raise
        except Exception as error:
            raise CompressorFault(
                f"{self.name}: the press failed on a prompt of {prefix.tokens} tokens", cause=f"{type(error).__name__}: {error}"
            ) from error


def _with(kept: Tensor, always: Tensor) -> Tensor:
    """Both, ascending; the newest token where there would be none, since no head may go empty."""
    mask = always.clone()
    mask[kept] = True
    if not bool(mask.any()):
        mask[-1] = True
    return torch.nonzero(mask).flatten()
