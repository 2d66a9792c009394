"""Compare an output with that of the full KV, and put metrics into words."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from vericache_core.engine import Engine
from vericache_core.outputs import RequestOutput
from vericache_core.sizes import size


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        against: what the output was compared with.
        identical: the promise was kept.
        equal_tokens, tokens: leading tokens that agree, and tokens in all.
        equal_logits: every logits row equal bit for bit; ``None`` when only tokens were compared.
        margin: top-2 margin of the reference's logits at the first divergence.
        plain_seconds: time of the plain full-KV decode of the same engine, prefill excluded.
    """

    against: str
    identical: bool
    equal_tokens: int
    tokens: int
    equal_logits: bool | None
    margin: float | None
    plain_seconds: float

    def verdict(self) -> str:
        """The line that counts."""
        text = f"{self.equal_tokens}/{self.tokens} tokens"
        if self.equal_logits is not None:
            text += ", logits bitwise equal" if self.equal_logits else ", logits differ"
        else:
            text += f", against {self.against}"
        if self.margin is not None:
            text += f", first divergence at token {self.equal_tokens} with top-2 margin {self.margin:.3g}"
        return ("identical: " if self.identical else "NOT identical: ") + text


def compare_bitwise(output: RequestOutput, plain: RequestOutput) -> Comparison:
    """Against the same engine's plain full-KV decode; both with recorded logits."""
    assert output.logits is not None
    assert plain.logits is not None
    equal = _common(output.token_ids, plain.token_ids)
    whole = output.token_ids == plain.token_ids
    logits = whole and torch.equal(_bits(output.logits), _bits(plain.logits))
    margin = None if whole else _margin(plain.logits[min(equal, len(plain.logits) - 1)])
    reason = output.finish_reason == plain.finish_reason
    total = max(len(output.token_ids), len(plain.token_ids))
    seconds = plain.metrics.seconds.get("decode", 0.0)
    return Comparison("the full KV", whole and logits and reason, equal, total, logits, margin, seconds)


def compare_with_transformers(engine: Engine, output: RequestOutput, plain: RequestOutput) -> Comparison:
    """Against ``generate(do_sample=False)`` of transformers: tokens only, as ``identity="token"`` promises."""
    ids = torch.tensor([output.prompt_token_ids], device=engine.adapter.device)
    count = max(1, len(output.token_ids))
    theirs = engine.adapter.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    tokens = tuple(theirs[0, ids.shape[1] :].tolist())
    equal = _common(output.token_ids, tokens)
    whole = output.token_ids == tokens
    assert plain.logits is not None
    margin = None if whole else _margin(plain.logits[min(equal, len(plain.logits) - 1)])
    seconds = plain.metrics.seconds.get("decode", 0.0)
    return Comparison("transformers generate", whole, equal, len(output.token_ids), None, margin, seconds)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _bits(logits: torch.Tensor) -> torch.Tensor:
    return logits.contiguous().view(torch.uint8)


def _margin(row: torch.Tensor) -> float:
    best, second = row.float().sort(descending=True).values[:2].tolist()
    return float(best - second)


def metrics_lines(output: RequestOutput, comparison: Comparison | None) -> list[str]:
    """Metrics as lines for people."""
    m = output.metrics
    lines = [] if comparison is None else [comparison.verdict()]
    lines.append(f"tokens: {m.prompt_tokens} prompt, {m.new_tokens} new; finished: {output.finish_reason}; {m.steps} steps")
    if m.compressor is not None:
        lines.append(
            f"acceptance: {m.accepted}/{m.drafted} drafts ({m.acceptance:.0%}) in {m.rounds} rounds; per round: "
            + " ".join(f"{a}/{d}" for a, d in zip(m.accepted_per_round, m.drafted_per_round, strict=True))
        )
        lines.append(
            f"KV bytes: full {size(m.compressed_from_bytes)} of the prompt, {m.compressor} {size(m.compressed_kv_bytes)}"
            + (f" ({m.compressed_kv_bytes / m.compressed_from_bytes:.1%})" if m.compressed_from_bytes else "")
            + f"; swapped in {size(m.swap_bytes)}; device peak {size(m.peak_device_kv_bytes)}"
        )
    lines.append("seconds: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in m.seconds.items()))
    if comparison is not None and comparison.plain_seconds and m.compressor is not None:
        ours = sum(m.seconds.get(phase, 0.0) for phase in ("draft", "verify", "decode"))
        lines.append(f"decoding: {ours:.2f} s, plain full KV {comparison.plain_seconds:.2f} s")
    lines += [f"degraded: {reason}" for reason in m.degraded]
    return lines


def to_json(output: RequestOutput, comparison: Comparison | None) -> dict[str, Any]:
    """One JSON object with everything."""
    logprobs = None
    if output.logprobs is not None:
        logprobs = [
            {"token": entry.token, "logprob": _finite(entry.logprob), "top": [[t, _finite(p)] for t, p in entry.top]}
            for entry in output.logprobs
        ]
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": logprobs,
        "metrics": dataclasses.asdict(output.metrics) | {"acceptance": output.metrics.acceptance},
        "comparison": None if comparison is None else dataclasses.asdict(comparison) | {"verdict": comparison.verdict()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
