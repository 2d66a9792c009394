"""What both sides must have in common before a token crosses the link: protocol, weights, numerics.

Recovery computes here what the verifier would have computed there. That gives the same bits only if the same model
runs in the same arithmetic, so each side says what it has, and a difference is refused by the name of the field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from vericache_core.cache.pages import PAGE
from vericache_core.engine import Engine
from vericache_core.errors import RemoteRefused
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.probe import Attend, Sequence1, run_blocks
from vericache_core.remote.frames import PROTOCOL

Facts = dict[str, str]


def facts_of(engine: Engine) -> Facts:
    """What an engine has, field by field; costs one pass over the weights and a few steps."""
    adapter = engine.adapter
    return {
        "protocol": str(PROTOCOL),
        "model": adapter.name,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "weights": weights_digest(adapter.model),
        "tokenizer": tokenizer_digest(engine.tokenizer),
        "identity": engine.admission.identity,
        "rows": str(adapter.rows),
        "page": str(PAGE),
        "numerics": numerics_digest(adapter, engine.attend),
    }


def refuse_differences(mine: Mapping[str, str], theirs: Mapping[str, Any]) -> None:
    """Raise ``RemoteRefused`` naming the first field in which the sides differ; of versions the protocol comes first."""
    for name, value in mine.items():
        other = theirs.get(name)
        if other != value:
            said = other[:64] if isinstance(other, str) else "nothing"
            raise RemoteRefused(
                f"the two sides differ in {name}",
                cause=f"here {value}, there {said}",
                hint="both must run the same release"
                if name == "protocol"
                else "both must run the same model, in the same arithmetic, on machines that compute the same bits",
            )


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over every parameter and buffer that is kept with the model: name, shape, dtype, bytes."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        head = json.dumps([name, list(weight.shape), str(weight.dtype)]).encode()
        digest.update(len(head).to_bytes(4, "little") + head)
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over vocabulary and special tokens; ``none`` without a tokenizer."""
    if tokenizer is None:
        return "none"
    facts = [sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.all_special_tokens))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def numerics_digest(adapter: ModelAdapter, attend: Attend) -> str:
    """SHA-256 over logits and KV bits of a fixed sequence: machines that agree on it compute alike.

    The sequence crosses a page of attention, in blocks of all rows and then one by one.
    """
    length = PAGE + adapter.rows // 2
    if adapter.max_positions is not None:
        length = min(length, adapter.max_positions)
    ids = torch.randint(0, adapter.vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()
    sequence, digest = Sequence1(adapter), hashlib.sha256()
    while sequence.tokens < length:
        block = ids[sequence.tokens : sequence.tokens + (adapter.rows if sequence.tokens < length - 2 else 1)]
        (logits,) = run_blocks(adapter, attend, [(sequence, block)])
        sequence.advance(len(block))
        digest.update(_bytes(logits))
    for pages in sequence.pages:
        for part in pages.rows(pages.first_row, sequence.tokens):
            digest.update(_bytes(part))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
