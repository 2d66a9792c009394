"""A model that proposes: whatever it says, or fails to say, no token and no bit depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import VOCAB, build
from tests.watch import assert_same, watching
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.errors import ConfigError
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.assistant import MOST, Assistant, AssistantProposer, check_vocabulary

PROMPTS = [list(range(1, 150)), list(range(3, 80)), [5, 6, 7, 8] * 12, list(range(9, 40))]
GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.9, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[RequestOutput]]:
    with Engine(model, config=EngineConfig(rows=16, probe=False)) as engine:
        return {
            name: engine.generate(PROMPTS, params, record_logits=True)
            for name, params in {"greedy": GREEDY, "sampled": SAMPLED}.items()
        }


def engine(model: Any, assistant: Any, **changes: Any) -> Engine:
    settings = {
        "rows": 16,
        "compressor": "random",
        "keep": 0.5,
        "window": 6,
        "probe": False,
        "proposer": "assistant",
        **changes,
    }
    return Engine(model, config=EngineConfig(**settings), assistant=(assistant, None))


def other(seed: int = 3, **changes: Any) -> Any:
    """A model of another size that knows nothing of the target."""
    return build("qwen2", seed=seed, num_hidden_layers=2, hidden_size=32, head_dim=8, **changes)


def assert_all_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("compressor", [None, "random", "identity"])
@pytest.mark.parametrize("who", ["itself", "unrelated"])
def test_an_assistant_changes_speed_only(
    model: Any, expected: dict[str, list[RequestOutput]], how: str, compressor: str | None, who: str
) -> None:
    keep = 0.5 if compressor == "random" else None
    assistant = model if who == "itself" else other()
    with engine(model, assistant, compressor=compressor, keep=keep) as ours, watching(ours):
        found = ours.generate(PROMPTS, GREEDY if how == "greedy" else SAMPLED, record_logits=True)
        assert not ours.loop.requests
    assert_all_same(found, expected[how])
    assert all(output.metrics.proposed for output in found)
    assert not any(output.metrics.degraded for output in found)
    if who == "itself" and compressor != "random":  # a drafter that differs may refuse what the full KV would have taken
        assert all(output.metrics.proposals_kept == output.metrics.proposed for output in found)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_one_that_is_right_saves_steps_and_one_that_is_not_is_asked_less_and_less(model: Any, how: str) -> None:
    params = SamplingParams(max_new_tokens=120) if how == "greedy" else SamplingParams(max_new_tokens=120, temperature=1.0)
    steps, proposed = {}, {}
    for who, assistant in (("itself", model), ("unrelated", other())):
        with engine(model, assistant, compressor=None, keep=None) as ours:
            (found,) = ours.generate([PROMPTS[3]], params)
            steps[who], proposed[who] = found.metrics.steps, found.metrics.proposed
    assert steps["itself"] <= 3 + 120 / (MOST + 1) + 6  # prefill, then rounds of MOST and a bonus, the first ones shorter
    assert steps["unrelated"] > 3 * steps["itself"]
    assert proposed["unrelated"] < 60  # by the noise that they share even a stranger hits a sampled token at times


def test_a_preempted_request_and_its_assistant_begin_anew(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    with engine(model, model, compressor="identity", keep=None, max_running=1) as ours:
        low = ours.submit(PROMPTS[0], GREEDY, record_logits=True)
        while len(low.token_ids) < 7:
            ours.step()
        high = ours.submit(PROMPTS[1], GREEDY, priority=5, record_logits=True)
        ours.step()
        assert low._request.proposals.proposer is not None
        assert low._request.proposals.proposer.device_bytes == 0
        assert_same(high.result(), expected["greedy"][1])
        assert_same(low.result(), expected["greedy"][0])
        assert low.result().metrics.preemptions == 1
        assert low.result().metrics.proposals_kept == low.result().metrics.proposed


def test_cancelling_gives_the_memory_of_the_assistant_back(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    with engine(model, other()) as ours:
        jobs = [ours.submit(prompt, GREEDY, record_logits=True) for prompt in PROMPTS]
        while not all(job.token_ids for job in jobs):
            ours.step()
        proposer = jobs[1]._request.proposals.proposer
        assert proposer is not None
        assert proposer.device_bytes > 0
        assert jobs[1]._request.device_bytes() > proposer.device_bytes
        jobs[1].cancel()
        assert proposer.device_bytes == 0
        while ours.step():
            pass
        for at in (0, 2, 3):
            assert_same(jobs[at].result(), expected["greedy"][at])
        assert jobs[1].token_ids == expected["greedy"][1].token_ids[: len(jobs[1].token_ids)]


def test_its_memory_counts_into_the_budget(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    with engine(model, model) as free:
        free.generate(PROMPTS, GREEDY)
        unbounded = free.loop.peak_device_kv_bytes
        requests = [free.builder.for_prompt(prompt, GREEDY, "random") for prompt in PROMPTS]
        alone = max(free.planner.holds(request).device + free.loop.batcher.transient(request) for request in requests)
        rows = max(request.greatest_length for request in requests) * sum(one.token_bytes for one in free.adapter.layers)
        assert alone > rows  # the assistant is the model itself, and holds its KV besides
    budget = int(alone * 1.1)
    assert budget < unbounded
    with engine(model, model, device_budget=budget) as ours:
        found = ours.generate(PROMPTS, GREEDY, record_logits=True)
        assert ours.loop.peak_device_kv_bytes <= budget
    assert_all_same(found, expected["greedy"])


class Faulty:
    """Breaks the assistant of an engine from its ``after``-th step on."""

    def __init__(self, assistant: Assistant, kind: str, after: int) -> None:
        self._run, self._kind, self._left = assistant.run, kind, after
        assistant.run = self  # type: ignore[assignment, method-assign]

    def __call__(self, *arguments: Any) -> Tensor:
        self._left -= 1
        if self._left >= 0:
            return self._run(*arguments)
        if self._kind == "raises":
            raise RuntimeError("out of order")
        return torch.full_like(self._run(*arguments), float("nan"))


@pytest.mark.parametrize("compressor", [None, "random"])
@pytest.mark.parametrize("kind", ["raises", "NaN"])
@pytest.mark.parametrize("after", [0, 9, 40])
def test_faults_of_the_assistant_end_its_proposals_and_nothing_else(
    model: Any, expected: dict[str, list[RequestOutput]], compressor: str | None, kind: str, after: int
) -> None:
    with engine(model, model, compressor=compressor, keep=0.5 if compressor else None) as ours:
        assert ours.builder.assistant is not None
        Faulty(ours.builder.assistant, kind, after)
        found = ours.generate(PROMPTS, GREEDY, record_logits=True)
    assert_all_same(found, expected["greedy"])
    degraded = [text for output in found for text in output.metrics.degraded]
    assert degraded
    assert all(text.startswith("proposer failed: ") for text in degraded)
    assert len(degraded) <= len(PROMPTS)


def test_drafting_goes_on_after_the_assistant_has_failed(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    with engine(model, model, compressor="identity", keep=None) as ours:
        assert ours.builder.assistant is not None
        Faulty(ours.builder.assistant, "raises", 0)
        found = ours.generate(PROMPTS, GREEDY, record_logits=True)
    assert_all_same(found, expected["greedy"])
    assert all(output.metrics.rounds and not output.metrics.proposed for output in found)


def test_an_assistant_of_fewer_positions_stops_in_time(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    with engine(model, other(max_position_embeddings=64)) as ours:
        found = ours.generate(PROMPTS, GREEDY, record_logits=True)
    assert_all_same(found, expected["greedy"])
    assert not any(output.metrics.degraded for output in found)


def test_an_assistant_of_another_vocabulary_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="another vocabulary") as caught:
        engine(model, other(vocab_size=VOCAB - 1))
    assert "without tokenizers" in str(caught.value.cause)


class Words:
    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words)}


def test_tokenizers_decide_about_vocabularies_where_there_are_any() -> None:
    check_vocabulary(Words("a", "b"), Words("a", "b"), 512, 500)  # padded to different widths
    with pytest.raises(ConfigError, match="another vocabulary") as caught:
        check_vocabulary(Words("a", "b", "c"), Words("a", "c", "b"), 512, 512)
    assert "'b' is 2 there and 1 here" in str(caught.value.cause)


def test_logits_of_another_width_are_cut_or_filled(model: Any) -> None:
    for width in (VOCAB - 12, VOCAB + 12):
        with Engine(model, config=EngineConfig(rows=16, probe=False)) as plain:
            assistant = Assistant(other(vocab_size=width), plain.attend, 16, "auto", VOCAB)
        proposer = AssistantProposer(assistant, lambda logits, _: int(logits.argmax()), 3)
        assert len(proposer.propose([1, 2, 3], [], 4)) == 4


def test_a_configuration_without_a_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        Engine(model, config=EngineConfig(rows=16, probe=False, proposer="assistant"))


def test_a_model_that_cannot_be_run_is_refused_as_the_assistant(model: Any) -> None:
    with pytest.raises(ConfigError, match="assistant model cannot be used"):
        engine(model, build("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}))


# -- one proposer alone ----------------------------------------------------------------------------------


def alone(model: Any, clock: Any = None) -> AssistantProposer:
    with Engine(model, config=EngineConfig(rows=16, probe=False)) as plain:
        assistant = Assistant(model, plain.attend, 16, "auto", VOCAB)
    more = {} if clock is None else {"clock": clock}
    return AssistantProposer(assistant, lambda logits, _: int(logits.argmax()), len(PROMPTS[3]), **more)


def test_its_rows_follow_commits_and_rejections(model: Any, expected: dict[str, list[RequestOutput]]) -> None:
    """However the sequence goes on, it proposes what a fresh one would; rows that it has are not run again."""
    right = list(expected["greedy"][3].token_ids)
    proposer, ran = alone(model), [0]
    run = proposer._assistant.run

    def counted(sequence: Any, ids: Sequence[int]) -> Tensor:
        ran[0] += len(ids)
        return run(sequence, ids)

    proposer._assistant.run = counted  # type: ignore[method-assign]
    tokens, drafts = list(PROMPTS[3]), list[int]()
    for drafted, committed in (([], 0), ([], 2), ([right[2], 7, 8], 2), ([9], 5), (right[5:8], 5), ([], 12)):
        tokens, drafts = [*PROMPTS[3], *right[:committed]], list(drafted)
        found = proposer.propose(tokens, drafts, 3)
        assert found == alone(model).propose(tokens, drafts, 3)
        if [*tokens, *drafts] == [*PROMPTS[3], *right[: committed + len(drafts)]]:
            start = committed + len(drafts)
            assert found == right[start : start + 3]
    assert ran[0] < len(PROMPTS[3]) + 6 * 8
    assert len(proposer._known) == proposer._rows.tokens


def test_it_keeps_up_with_a_prefill_in_steps(model: Any) -> None:
    proposer, long = alone(model), [number % 500 for number in range(200)]
    most = proposer._assistant.adapter.most_rows
    proposer.follow(long, 48)
    assert proposer._known == long[:48]
    proposer.follow(long, 48)
    assert proposer._known == long[:48]
    assert proposer.propose(long, [], 4) == []  # too far behind: it catches up a step at a time
    assert proposer._known == long[: 48 + most]
    rest = [proposer.propose(long, [], 4) for _ in range(2)]
    assert len(rest[-1]) == 4


def test_what_it_costs_is_measured_and_rests_count(model: Any) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # a second between the two readings of a proposal
        return now[0]

    proposer = alone(model, clock)
    assert proposer.seconds(5) == 0.0
    for _ in range(60):
        proposer.propose(PROMPTS[3], [], 4)
    assert proposer.seconds(8) == pytest.approx(8 / 4, rel=0.01)
    for _ in range(8):
        proposer.told(4, 0)
    for _ in range(60):
        assert proposer.propose(PROMPTS[3], [], 4) == []
    assert proposer.seconds(8) < 0.02


def test_prices_of_rounds_include_it(model: Any) -> None:
    with engine(model, other(), window="auto") as ours:
        request = ours.builder.for_prompt(PROMPTS[3], GREEDY, "random")
        assert request.pace is not None
        assert request.proposals.proposer is not None
        before = request.pace._prices()
        request.proposals.proposer._seconds_per_draft = 0.5  # type: ignore[attr-defined]
        after = request.pace._prices()
        assert [late - early for early, late in zip(before, after, strict=True)] == pytest.approx(
            [0.5 * drafts for drafts in range(len(before))]
        )
        request.close()
