from __future__ import annotations

import pytest
import torch

from tests.models import VOCAB, engine_over, model, prompt
from vericache_core.bench.answers import parses
from vericache_core.bench.compressors import Row, Setting, bench_compressors
from vericache_core.bench.drafts import Drafts, accepted_mean, accepted_runs, divergence, hazard
from vericache_core.bench.lines import as_line, from_line
from vericache_core.bench.prompts import BenchPrompt, Grammar, build_prompts
from vericache_core.cache.draft import DraftKV
from vericache_core.cli.bench import _HEADER, cells, markdown
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


def test_the_first_block_counts_in_full() -> None:
    row = rows_of(new_tokens=33)["identity"]
    assert row.accepted_mean[32] == 32  # no later start has so many tokens left


def test_few_new_tokens_leave_wide_windows_open() -> None:
    row = rows_of(new_tokens=8)["random"]
    assert row.accepted_mean[4] is not None
    assert row.accepted_mean[16] is None
    assert "-" in cells(row)


@pytest.mark.parametrize("grammar", [None, "json"])
def test_sliding_windows_stay_exact_and_the_other_layers_are_measured(grammar: Grammar | None) -> None:
    ours = engine_over(model("gemma3"), full_kv="host")
    asked = [BenchPrompt("one", tuple(prompt(140, seed=4)), (), grammar)]
    rows = {row.compressor: row for row in bench_compressors(ours, Registry(discover=False), SETTINGS, asked, 42)}
    assert all(row.identical and row.error is None for row in rows.values())
    assert (rows["identity"].hazard, rows["identity"].first_divergence) == (0, None)
    single = engine_over(model("gemma3"), compressor="random", keep=0.5, window=32)
    (real,) = single.generate(prompt(140, seed=4))
    assert rows["random"].first_divergence == real.metrics.accepted_per_round[0] + 1


def test_a_model_without_a_layer_to_compress_is_named() -> None:
    ours = engine_over(model("mistral"))
    asked = [BenchPrompt("one", tuple(prompt(60, seed=1)))]
    (row,) = bench_compressors(ours, Registry(discover=False), SETTINGS[:1], asked, 8)
    assert row.error == "the model has no layer that can be compressed"
    assert row.identical
    assert row.keep_bytes_fraction is None


class Letters:
    """A tokenizer that writes every id as a character."""

    eos_token_id = 3

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)  # a letter of its own for each


@pytest.mark.parametrize("rows", [8, 16])
def test_the_lossy_output_is_what_the_compressed_kv_alone_writes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out for grammars only, so it must differ from the full output where the blocks of right tokens say."""
    seen: dict[int, str] = {}

    def record(text: str, *_: object) -> bool:
        seen[len(seen)] = text
        return True

    monkeypatch.setattr("vericache_core.bench.compressors.parses", record)
    ours = engine_over(model("gemma3"), Letters(), full_kv="host", rows=rows)
    asked = [BenchPrompt("one", tuple(prompt(60, seed=4)), (), "json")]
    found = list(bench_compressors(ours, Registry(discover=False), SETTINGS, asked, 42))
    for number, row in enumerate(found):
        full, lossy = seen[2 * number], seen[2 * number + 1]
        assert len(lossy) == 42
        same = next((i for i, (a, b) in enumerate(zip(full, lossy, strict=True)) if a != b), None)
        assert same == row.first_divergence
        assert row.lossy_parses is True
    assert found[1].first_divergence == 6


def test_every_lossy_token_follows_from_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free, written = Drafts.free, []

    def checked(self: Drafts, draft: DraftKV, different: int | None, ends: list[int]) -> list[int]:
        found = free(self, draft, different, ends)
        again = self._run(draft, found[:-1])
        draft.retract()
        assert again.argmax(-1).tolist() == found[1:]
        written.append(found)
        return found

    monkeypatch.setattr(Drafts, "free", checked)
    asked = [BenchPrompt("one", tuple(prompt(60, seed=4)), (), "json")]
    list(bench_compressors(engine_over(model("gemma3")), Registry(discover=False), SETTINGS, asked, 42))
    assert [len(found) for found in written] == [42] * 4
    assert written[0] != written[1]


def test_a_lossy_output_ends_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ending id ends it also behind its first difference, where the full output goes on."""
    asked = [BenchPrompt("one", tuple(prompt(60, seed=4)), (), "json")]
    seen: list[list[int]] = []

    class Kept(Letters):
        def decode(self, ids: list[int], **options: object) -> str:
            seen.append(list(ids))
            return super().decode(ids, **options)

    def run() -> Row:
        ours = engine_over(model("gemma3"), Kept())
        seen.clear()
        (row,) = bench_compressors(ours, Registry(discover=False), SETTINGS[1:2], asked, 42)
        assert row.identical
        return row

    run()
    plain, lossy = seen[-2:]
    end = next(i for i in range(8, 42) if lossy[i] not in plain and lossy[i] not in lossy[:i])
    monkeypatch.setattr("vericache_core.building.ending_ids", lambda *_: (lossy[end],))
    monkeypatch.setattr("vericache_core.bench.compressors.ending_ids", lambda *_: (lossy[end],))
    assert run().new_tokens == 42
    assert seen[-2:] == [plain, lossy[: end + 1]]


def test_rows_that_are_known_are_not_measured_again_and_progress_is_told() -> None:
    ours = engine_over(model("llama"))
    asked = [BenchPrompt(name, tuple(prompt(60, seed=1))) for name in ("one", "two")]
    told: list[str] = []
    found = bench_compressors(
        ours,
        Registry(discover=False),
        SETTINGS[:2],
        asked,
        8,
        told.append,
        lambda setting, prompt: prompt.name == "one" or setting.compressor == "random",
    )
    assert [(row.prompt, row.compressor) for row in found] == [("two", "identity")]
    assert "two: full KV: 16 of 60 prompt tokens" in told
    assert told[-1] == "two: drafts of identity"
    assert not any("one" in text for text in told)


def test_figures_of_runs() -> None:
    runs = [(4, 4), (1, 4), (0, 2)]
    assert accepted_mean(runs, 4) == 2.5
    assert accepted_mean(runs, 2) == 1.0
    assert accepted_mean(runs, 5) is None
    assert hazard(runs) == 2 / 7
    assert hazard([]) is None
    assert [hazard(runs, window) for window in (2, 4, 5)] == [2 / 5, 1 / 6, None]


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
        ("```python\ndef f():\n    return 1\ndef g(\n```\nDone", "python", False),
        ("```python\ndef f():\n    return 1\ndef g(", "python", True),
        ("def f():\n    return 1\ndef g(", "python", True),
        ("def f():\n    return 1\ndef g(\n\n\nx", "python", False),
        ("Here you are: it works", "python", False),
        ("", "python", False),
        ('Sure: {"name": "f", "arguments": {}} ok', "json", True),
        ('{"name": "f", "argum', "json", False),
        ("no object", "json", False),
        ("anything", None, None),
    ],
)
def test_parsing(text: str, grammar: Grammar | None, expected: bool | None) -> None:
    assert parses(text, grammar, whole=False) is expected


def test_only_an_answer_that_was_cut_may_miss_lines() -> None:
    text = "def f():\n    return 1\ndef g("
    assert parses(text, "python", whole=False)
    assert not parses(text, "python", whole=True)


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
    assert from_line({"model": "x"}, as_line({"model": "x"}, row)) == row
    assert from_line({"model": "y"}, as_line({"model": "x"}, row)) is None
    table = markdown([row, Row("x", {}, "one", 3, 0, error="why")]).splitlines()
    assert [line.count("|") for line in table[:4]] == [len(_HEADER) + 1] * 4
