"""On a real model: the promise where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vericache_conform.case import Case, attempt
from vericache_conform.check import check
from vericache_conform.mismatch import require_same
from vericache_conform.outcome import Evidence, Failure, Unable
from vericache_core.config import EngineConfig
from vericache_core.errors import UnsupportedModelError, VeriCacheError
from vericache_core.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vericache_core.engine import Engine

TEXT = (
    "A lighthouse keeper on a small island writes down what she sees. In the morning fog lies over the bay and the "
    "ferry is late. At noon two fishing boats come back with cod and haddock, and a boy counts the crates on the "
    "pier. In the afternoon the wind turns to the north, the glass falls, and she checks the lamp, the oil and the "
    "rope of the bell. By evening the harbour is closed. A letter from the mainland says that the new lens will "
    "arrive on the ninth of March with the supply ship Aurora. "
)
QUESTIONS = ("When does the new lens arrive, and on which ship?", "List what the keeper checks in the afternoon.")
TOKENS = 40


@check(
    "M-01",
    tier="model",
    cost=240.0,
    timeout=900.0,
    rationale="Random weights are a hard test of arithmetic, and no test of text. On a real model the drafts are good, blocks "
    "are long, and acceptance means something.",
    origin="Benchmarks that compare scores instead of tokens.",
    fix="See R-01: identity cannot depend on the compressor unless it touches what is not its own.",
)
def real_model(case: Case) -> Evidence:
    """On a real model, greedy and sampled output equal plain full-cache decoding bit for bit; acceptance is reported."""
    engine = _engine(case)
    totals = {"drafted": 0, "accepted": 0, "tokens": 0}
    share = 1.0

    def body(example: Mapping[str, Any]) -> None:
        nonlocal share
        text = TEXT * example["repeat"] + "\n\n" + QUESTIONS[example["question"]]
        chat = bool(getattr(engine.tokenizer, "chat_template", None))
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, **example["sampling"])
        expected = engine.generate([prompt], params, compressor=None, record_logits=True)[0]
        got = attempt("generate", lambda: engine.generate([prompt], params, record_logits=True)[0])
        require_same(expected, got, f"question {example['question']}")
        if not got.metrics.drafted:
            raise Failure("nothing was drafted")
        totals["drafted"] += got.metrics.drafted
        totals["accepted"] += got.metrics.accepted
        totals["tokens"] += len(got.token_ids)
        share = got.metrics.compressed_kv_bytes / max(1, got.metrics.compressed_from_bytes)

    examples = [
        {"question": 0, "repeat": 3, "sampling": {}},
        {"question": 1, "repeat": 2, "sampling": {"temperature": 0.7, "seed": 5}},
    ]
    with engine:
        tried = case.for_each(examples, body)
    acceptance = round(totals["accepted"] / max(1, totals["drafted"]), 4)
    return Evidence(tried, {**totals, "acceptance": acceptance, "bytes_share": round(share, 4), "model": case.model})


def _engine(case: Case) -> Engine:
    """The real model with the compressor under test, out of the registry that holds it."""
    from vericache_core.engine import Engine  # slow to import, see bench
    from vericache_core.model.load import load_model

    subject = case.subject
    try:
        dtype = torch.bfloat16 if case.model == "demo" else None
        model, tokenizer = load_model(case.model, dtype, "cuda" if torch.cuda.is_available() else "cpu")
    except VeriCacheError as error:
        raise Unable(str(error)) from error
    settings: dict[str, Any] = {"compressor": subject.name, "options": dict(subject.options), "full_kv": "host", "fold": 64}
    try:
        return Engine(model, tokenizer, EngineConfig(**settings), subject.registry)
    except UnsupportedModelError as error:
        raise Unable(f"the model {case.model!r} is refused: {error}") from error
    except VeriCacheError as error:
        raise Failure(f"the engine refuses the compressor on {case.model!r}: {error}") from error
