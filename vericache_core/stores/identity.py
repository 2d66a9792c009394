"""What KV rows are a function of, and the keys that follow from it.

Rows may be reused only where everything they depend on is the same: the weights, what the forward does with them, and
the arithmetic it is done with. Every field is part of every key, so other rows have other keys and cannot be found by
mistake. A key is a SHA-256 over tagged, length-prefixed parts; keys of a prompt's chunks form a chain, so a chunk's
key stands for all tokens up to its end.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

FORMAT = 1
"""Version of keys and blobs; raised whenever either would mean something else."""


@dataclass(frozen=True, kw_only=True)
class PrefixIdentity:
    """Everything besides token ids that decides the bits of a KV row.

    Attributes:
        weights: digest of every parameter and buffer, by name.
        config: digest of the model's configuration: what the forward does with the weights.
        layout: layers, heads, widths, windows and scaling, as canonical JSON.
        dtype: of the KV rows, such as ``bfloat16``.
        rotary: rotary settings, as canonical JSON.
        tokenizer: digest of the tokenizer, empty without one.
        adapter: adapters (LoRA and the like) that are active, empty without.
        numerics: the arithmetic: implementation of attention, rows and shapes of a step, packing, threads, versions,
            processor. The same sums in another order have other bits.
        tenant: salt; blobs of different tenants are out of each other's reach.
        format: version of keys and blobs.
    """

    weights: str
    config: str
    layout: str
    dtype: str
    rotary: str
    tokenizer: str
    numerics: str
    adapter: str = ""
    tenant: str = ""
    format: int = FORMAT

    @property
    def root(self) -> bytes:
        """32 bytes that stand for all fields."""
        return digest("identity", *(part for name, value in self._named() for part in (name, value)))

    def public(self) -> dict[str, str]:
        """A short digest per field, to tell which one differs; without the tenant, who is nobody else's business."""
        return {name: digest("field", name, value).hex()[:16] for name, value in self._named() if name != "tenant"}

    def _named(self) -> list[tuple[str, str]]:
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]


def digest(tag: str, *parts: str | bytes) -> bytes:
    """SHA-256 of ``tag`` and ``parts``, each with its kind and length before it: no two lists share an encoding."""
    sha = hashlib.sha256()
    for part in (f"vericache/{tag}", *parts):
        data = part.encode() if isinstance(part, str) else part
        sha.update(struct.pack("<cQ", b"s" if isinstance(part, str) else b"b", len(data)))
        sha.update(data)
    return sha.digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit numbers; ``ValueError`` for one that is not such a number."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"a token id is no unsigned 32-bit number ({error})") from error


def chain(identity: PrefixIdentity, token_ids: Sequence[int], chunk: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One link of 32 bytes per full chunk of ``chunk`` tokens; a link stands for all tokens up to the end of its chunk.

    ``known`` are the first links, where they were computed before.
    """
    links = list(known[: len(token_ids) // chunk])
    link = links[-1] if links else _beginning(identity, chunk)
    for start in range(len(links) * chunk, len(token_ids) - chunk + 1, chunk):
        link = digest("link", link, token_bytes(token_ids[start : start + chunk]))
        links.append(link)
    return links


def full_key(link: bytes) -> str:
    """Key of the blob with the full KV of the chunk that ends a chain."""
    return f"full-{digest('full', link, EXACT).hex()}"


def tail_key(identity: PrefixIdentity, links: Sequence[bytes], chunk: int, rest: Sequence[int]) -> str:
    """Key of the blob with the full KV of what a prefix has behind its last whole chunk; ``links`` are those of its chunks."""
    return full_key(digest("tail", links[-1] if links else _beginning(identity, chunk), token_bytes(rest)))


def compressed_key(
    identity: PrefixIdentity,
    token_ids: Sequence[int],
    compressor: str,
    options: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    seed: int = 0,
    protected: Sequence[tuple[int, int]] = (),
) -> str:
    """Key of the compressed KV of exactly ``token_ids``: the compressor and all that steers it are part of it.

    ``extra`` is what it says of itself beyond its options, such as the version of its algorithm.
    """
    spans = [list(span) for span in protected]
    steering = canonical({"options": dict(options), "extra": dict(extra or {}), "seed": seed, "protected": spans})
    return f"compressed-{digest('compressed', identity.root, token_bytes(token_ids), compressor, steering).hex()}"


def _beginning(identity: PrefixIdentity, chunk: int) -> bytes:
    """What every chain begins with."""
    return digest("chain", identity.root, str(chunk))


def index_key(tenant: str, token_ids: Sequence[int], chunk: int) -> str:
    """Key of the note that says under which identity a tenant's first chunk was stored."""
    return f"index-{digest('index', tenant, str(FORMAT), token_bytes(token_ids[:chunk])).hex()}"


def canonical(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces, ASCII.

    Raises:
        TypeError, ValueError: not made of JSON types.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


EXACT = "raw"
"""The one codec of full KV: the bytes themselves. A codec that loses bits can have no full key."""
