"""Toy tokenizers and a toy model for the runtime tests; no weights, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vericache_core.runtime.choose import Choice, TokenChooser

PIECES = ("END", "ST", "OP", "STOP", "xENDy", " ", "é", "日本", "\u65e5", "ab", "ba", "aab", "\U0001f600")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, later ones the given pieces; ``special`` ids decode to nothing when skipped."""

    def __init__(self, pieces: Iterable[str | bytes] = PIECES, special: Iterable[int] = ()) -> None:
        self.vocab = [bytes([value]) for value in range(256)] + [
            piece if isinstance(piece, bytes) else piece.encode() for piece in pieces
        ]
        self.all_special_ids = list(special)
        self.decoded_tokens = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded_tokens += len(token_ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return b"".join(self.vocab[token] for token in token_ids if token not in skipped).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """One id a byte; no pieces."""
        return list(text.encode())

    def piece(self, text: str) -> int:
        return self.vocab.index(text.encode(), 256)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2 style: every byte and a few pieces, one special token (id 0)."""
    letters = sorted(set(_bytes_to_unicode().values()))
    table = _bytes_to_unicode()
    pieces = ["".join(table[value] for value in piece.encode()) for piece in (" the", "日", "é!", " x", "<b>")]
    vocab = {piece: index for index, piece in enumerate(["<eos>", *letters, *pieces])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama-2 style: metaspace, byte fallback, leading space stripped, one special token (id 0)."""
    pieces = [f"<0x{value:02X}>" for value in range(256)] + ["▁", "▁the", "▁x", "e", "é", "日", "▁▁", "!"]
    vocab = {piece: index for index, piece in enumerate(["<eos>", *pieces])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def _bytes_to_unicode() -> dict[int, str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [value for value in range(256) if value not in plain]
    return {**{value: chr(value) for value in plain}, **{value: chr(256 + index) for index, value in enumerate(rest)}}


def toy_logits(vocab: int, seed: int = 0) -> Callable[[Sequence[int]], Tensor]:
    """A model: logits are a pure function of the last three ids and the length, with repetitive habits."""

    def logits(prefix: Sequence[int]) -> Tensor:
        state = (seed, len(prefix) % 3, *prefix[-3:])
        generator = torch.Generator().manual_seed(hash(state) % 2**63)
        return torch.randn(vocab, generator=generator) * 2

    return logits


def speculate(
    chooser: TokenChooser,
    model: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    drafter: Callable[[Sequence[int], int], int],
    *,
    tokens: int,
    window: int,
    stop: Callable[[Choice], bool] = lambda choice: False,
) -> list[Choice]:
    """The draft and verify loop in its plainest form: ``drafter(generated, own draft)`` may replace each draft."""
    generated: list[int] = []
    choices: list[Choice] = []
    while len(generated) < tokens:
        drafts: list[int] = []
        for _ in range(window):
            past = generated + drafts
            drafts.append(drafter(past, chooser.draft(model([*prompt, *past]), past)))
        for draft in [*drafts, None]:
            choice = chooser.choose(model([*prompt, *generated]), generated)
            chooser.check_integrity()
            choices.append(choice)
            generated.append(choice.token)
            if stop(choice) or len(generated) == tokens:
                return choices
            if choice.token != draft:
                break
    return choices
