"""Compressed KV by prompt: drafting may begin without compressing the prefix again.

A blob holds what ``CompressedKV.to_payload`` gives, the one form in which compressed KV leaves a process. It lies in a
namespace of its own and can never stand for full KV. The compressor, all that steers it and the version of its algorithm
(``extra``) are part of the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vericache_core.compressor import Compressor
from vericache_core.errors import PayloadError
from vericache_core.kv import CompressedKV
from vericache_core.payload import dump_compressed, load_compressed
from vericache_core.stores.base import KVBlobs, Packed
from vericache_core.stores.format import compressed_header, decode_blob
from vericache_core.stores.identity import compressed_key

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class LoadedCompressed:
    """What came of a load.

    Attributes:
        compressed: None where there is none.
        bytes: of its blob.
        fault: what went wrong, if anything did; compressed KV that is simply not there is no fault.
    """

    compressed: CompressedKV | None = None
    bytes: int = 0
    fault: str | None = None


class CompressedStore(KVBlobs):
    """See the module docstring and :class:`KVBlobs`."""

    def capture(self, token_ids: Sequence[int], compressed: CompressedKV, *, seed: int = 0, protected: Spans = ()) -> Packed:
        """Copy the compressed KV of exactly ``token_ids``, to be put into the store.

        ``seed`` and ``protected`` are those of the context that it was compressed in.
        """
        if compressed.tokens != len(token_ids):
            raise PayloadError(f"compressed KV of {compressed.tokens} tokens cannot stand for {len(token_ids)}")
        key = self._key(token_ids, compressed, seed, protected)
        header = compressed_header(self.identity, key, len(token_ids), compressed.compressor, compressed.options)
        return Packed(header, [dump_compressed(compressed)])

    def load(
        self,
        token_ids: Sequence[int],
        compressor: Compressor,
        *,
        seed: int = 0,
        protected: Spans = (),
        needed: Collection[int] = (),
        device: torch.device | str = "cpu",
        deadline: float | None = None,
    ) -> LoadedCompressed:
        """What ``compressor`` would make of exactly ``token_ids``, where it is stored; never raises.

        Args:
            token_ids: the prefix.
            compressor: names itself and its options; rebuilds what is found.
            seed: of the context that it would compress in.
            protected: spans of that context.
            needed: layers that must not have been declined.
            device: of the rows and codes.
            deadline: of ``time.monotonic()``.
        """
        until = self._until(deadline)
        try:
            # What a compressor says of itself is in all that it makes, even of nothing.
            nothing = compressor.restore(0, [None] * len(self.layers), self.layers)
            key = self._key(token_ids, nothing, seed, protected)
            found = self.blobs.get(key, deadline=until)
            if found is None:
                self.tally.add(compressed_misses=1)
                return LoadedCompressed()
            try:
                restored = self._restored(memoryview(found), key, len(token_ids), compressor, nothing, device)
                if lacking := [layer for layer in needed if restored.layers[layer] is None]:
                    raise PayloadError(f"compressed KV lacks layers {lacking}")  # noqa: TRY301
            except PayloadError:
                self._remove(key, until)
                raise
        except Exception as error:  # noqa: BLE001 (whatever a backend or a plugin does costs speed, never tokens)
            return LoadedCompressed(fault=self._fault("compressed KV", error))
        nbytes = memoryview(found).nbytes
        self.tally.add(compressed_loaded=1, bytes_loaded=nbytes)
        return LoadedCompressed(restored, nbytes)

    def _key(self, token_ids: Sequence[int], made: CompressedKV, seed: int, protected: Spans) -> str:
        return compressed_key(
            self.identity, token_ids, made.compressor, made.options, extra=made.extra, seed=seed, protected=protected
        )

    def _restored(
        self,
        blob: memoryview,
        key: str,
        tokens: int,
        compressor: Compressor,
        nothing: CompressedKV,
        device: torch.device | str,
    ) -> CompressedKV:
        header = compressed_header(self.identity, key, tokens, nothing.compressor, nothing.options)

        def create(name: str, options: Mapping[str, Any]) -> Compressor:
            if (name, dict(options)) != (nothing.compressor, dict(nothing.options)):
                raise PayloadError(f"compressed KV is of {name!r} with {dict(options)}", cause="its blob says otherwise")
            return compressor

        restored = load_compressed(bytes(decode_blob(blob, header)), create, device)
        if restored.tokens != tokens or restored.descriptors != self.layers:
            raise PayloadError("compressed KV is of another prefix or model")
        return restored
