from __future__ import annotations

import pytest
import torch

from tests.models import VOCAB, engine_over, model, prompt
from vericache_core.bench.answers import parses
from vericache_core.bench.compressors import Row, Setting, bench_compressors
from vericache_core.bench.drafts import accepted_mean, accepted_runs, divergence, hazard
from vericache_core.bench.prompts import BenchPrompt, Grammar, build_prompts
from vericache_core.cli.bench import _HEADER, cells, markdown, to_json
from vericache_core.errors import ConfigError
from vericache_core.plugins.registry import Registry

SETTINGS = [
    Setting("identity"),
    Setting("random", {"keep": "0.5"}),
    Setting("adversarial"),
    Setting("random+adversarial", {"keep": "0.5"}),
]


def rows_of(tier: str = "host", new_tokens: int = 42, rows: int = 16) -> dict[str, Row]:
    ours = engine_over(model("llama"), full_kv=tier, rows=rows)
    prompts = [BenchPrompt("one", tuple(prompt(60, seed=1)), ((0, 3),))]
    found = bench_compressors(ours, Registry(discover=False), SETTINGS, prompts, new_tokens)
    return {row.compressor: row for row in found}


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_the_two_ends_of_the_scale(tier: str) -> None:
    rows = rows_of(tier)
    assert [row.error for row in rows.values()] == [None] * 4
    assert all(row.identical for row in rows.values())
    best, worst = rows["identity"], rows["adversarial"]
    assert best.accepted_mean == {4: 4, 8: 8, 16: 16, 32: 32}
    assert (best.hazard, best.first_divergence, best.keep_bytes_fraction) == (0, None, 1)
    assert best.kl_nats is not None
    assert best.kl_nats < 1e-6
    assert worst.hazard is not None
    assert worst.hazard > 0.5
    assert worst.first_divergence in (1, 2)
    assert rows["random+adversarial"].keep_bytes_fraction is not None
    assert rows["random+adversarial"].keep_bytes_fraction < 0.2
    assert best.new_tokens == 42


def test_accepted_runs_are_those_of_real_drafting() -> None:
    """The first block starts where a real run starts: after the first token, with an empty tail."""
    rows = rows_of(rows=8)  # a block of 32 drafts takes several steps
    row = rows["random"]
    ours = engine_over(model("llama"), compressor="random", keep=0.5, window=32, rows=8)
    (real,) = ours.generate(prompt(60, seed=1))
    first = real.metrics.accepted_per_round[0]
    assert row.first_divergence == first + 1


def test_few_new_tokens_leave_wide_windows_open() -> None:
    row = rows_of(new_tokens=8)["random"]
    assert row.accepted_mean[4] is not None
    assert row.accepted_mean[16] is None
    assert "-" in cells(row)


def test_sliding_windows_are_refused() -> None:
    ours = engine_over(model("gemma3"))
    with pytest.raises(ConfigError, match="sliding"):
        next(bench_compressors(ours, Registry(discover=False), SETTINGS, [], 4))


def test_figures_of_runs() -> None:
    runs = [(4, 4), (1, 4), (0, 2)]
    assert accepted_mean(runs, 4) == 2.5
    assert accepted_mean(runs, 2) == 1.0
    assert accepted_mean(runs, 5) is None
    assert hazard(runs) == 2 / 7
    assert hazard([]) is None


def test_ties_go_to_the_lowest_id_and_kl_is_that_of_the_definition() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    assert accepted_runs([logits], [9, 0, 1]) == [(2, 2)]
    assert accepted_runs([logits], [9, 1, 1]) == [(0, 2)]
    full = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    p, q = torch.softmax(full[1], -1), torch.softmax(logits[0], -1)
    expected = float((p * (p / q).log()).sum()) / 2
    assert divergence([logits], full) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "grammar", "expected"),
    [
        ("```python\ndef f():\n    return 1\n```\nDone", "python", True),
        ("def f():\n    return 1\ndef g(", "python", True),
        ("Here you are: it works", "python", False),
        ("", "python", False),
        ('Sure: {"name": "f", "arguments": {}} ok', "json", True),
        ('{"name": "f", "argum', "json", False),
        ("no object", "json", False),
        ("anything", None, None),
    ],
)
def test_parsing(text: str, grammar: Grammar | None, expected: bool | None) -> None:
    assert parses(text, grammar) is expected


class Words:
    """A tokenizer of words, without a chat template."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [len(word) % VOCAB for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join("x" * token for token in ids)


@pytest.mark.parametrize("tokens", [64, 1000, 3000])
def test_prompts_have_the_length_asked_for(tokens: int) -> None:
    found = build_prompts(Words(), VOCAB, tokens)
    assert [made.name for made in found] == ["code", "summary", "question", "tool-call"]
    assert all(tokens - 3 <= len(made.token_ids) <= tokens for made in found)


def test_prompts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        build_prompts(Words(), VOCAB, 5)
    with pytest.raises(ConfigError, match="unknown prompt 'poem'"):
        build_prompts(Words(), VOCAB, 500, ["poem"])


def test_rows_as_text_and_json() -> None:
    row = rows_of()["random"]
    assert len(cells(row)) == len(_HEADER)
    assert to_json(row)["accepted_mean"].keys() == {"4", "8", "16", "32"}
    table = markdown([row, Row("x", {}, "one", 3, 0, error="why")]).splitlines()
    assert [line.count("|") for line in table[:4]] == [len(_HEADER) + 1] * 4
