"""What needs no engine: reading verdicts, the loop, the drafter, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from vericache_core.errors import CompressorFault, ConfigError, OptionError, PromptError, RemoteError
from vericache_core.kv import LayerDescriptor
from vericache_vllm import client, compat, home, plugin, waiting
from vericache_vllm.attention import RowQuantizer, build_quantizer
from vericache_vllm.compat import HOOKS, Hook, IncompatibleEngineError, difference, require_compatible
from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.speculation import EXACT_METHODS, compressed_draft, dtype_draft, refuse_lossy, speculative
from vericache_vllm.verdict import Check, TopTwo, Verdict, judge

PROMPTS = [tiny.prompt(90, seed=1), tiny.prompt(64, seed=2)]


class PlainVerifier:
    """Full forwards of transformers; ``ties`` are positions whose two best scores it reports as equal."""

    max_model_len, vocab_size = 512, tiny.VOCAB

    def __init__(self, folder: Path, ties: Sequence[int] = ()) -> None:
        self.model, self.ties, self.asked = AutoModelForCausalLM.from_pretrained(folder).eval(), set(ties), 0

    def verify(self, checks: Sequence[Check]) -> list[Verdict]:
        self.asked += len(checks)
        return [self._verdict(check) for check in checks]

    def _verdict(self, check: Check) -> Verdict:
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*check.verified, *check.drafts]])).logits[0].log_softmax(-1)
        rows: list[TopTwo] = []
        for at in range(len(check.drafts)):
            position = len(check.verified) - 1 + at
            (best, second), (first, other) = (part.tolist() for part in logits[position].topk(2))
            rows.append(((first, best), (other, best if position in self.ties else second)))
        return judge(rows, check.drafts, int(logits[-1].argmax()))


# -- verdicts -----------------------------------------------------------------------------------------


def rows(*best: int) -> list[TopTwo]:
    return [((token, -0.5), (token + 1, -1.5)) for token in best]


@pytest.mark.parametrize(
    ("drafts", "accepted", "token"), [((1, 2, 3), 3, 9), ((1, 2, 4), 2, 3), ((5, 2, 3), 0, 1), ((1, 5, 3), 1, 2)]
)
def test_judge(drafts: tuple[int, ...], accepted: int, token: int) -> None:
    verdict = judge(rows(1, 2, 3), drafts, bonus=9)
    assert (verdict.accepted, verdict.token) == (accepted, token)
    assert verdict.margins == (1.0,) * min(accepted + 1, 3)


def test_judge_leaves_a_tie_open() -> None:
    tied = rows(1, 2, 3)
    tied[1] = ((2, -0.5), (7, -0.5))
    assert judge(tied, (1, 2, 3), bonus=9) == Verdict(1, None, (1.0,))


@pytest.mark.parametrize("bad", [((1, float("nan")), (2, -1.0)), ((1, -2.0), (2, -1.0)), ((1, float("inf")), (2, -1.0))])
def test_judge_refuses_nonsense(bad: TopTwo) -> None:
    with pytest.raises(RemoteError):
        judge([bad], (1,), bonus=9)
    with pytest.raises(RemoteError, match="0 rows"):
        judge([], (1,), bonus=9)


@pytest.mark.parametrize("changed", [{"max_model_len": None}, {"max_model_len": "x"}, {"vocab_size": 1.5}])
def test_a_server_has_to_say_its_limits(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    facts = {"protocol": 1, "max_model_len": 512, "vocab_size": 100, **changed}
    monkeypatch.setattr(client.HttpVerifier, "_ask", lambda *_: facts)
    with pytest.raises(RemoteError, match="how long"):
        client.HttpVerifier("https://h", "token")
    monkeypatch.setattr(client.HttpVerifier, "_ask", lambda *_: {**facts, "protocol": 2})
    with pytest.raises(ConfigError, match="protocol 2"):
        client.HttpVerifier("https://h", "token")


# -- the loop -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    return [output.token_ids for output in generate(PROMPTS, 40, PlainVerifier(model))]


@pytest.mark.parametrize("fold", [0, 8])
@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        ("identity", {}),
        ("uniform", {"bits": 2}),
        ("kivi", {"bits": 2, "residual": 32}),
        ("snapkv", {"keep": 0.3}),
        ("adversarial", {}),
    ],
)
def test_drafts(model: Path, reference: list[list[int]], compressor: str, options: dict[str, Any], fold: int) -> None:
    drafter = CompressedDrafter.from_pretrained(str(model), compressor, options=options, fold=fold)
    verifier = PlainVerifier(model)
    outputs = generate(PROMPTS, 40, verifier, drafter, window=5)
    assert [output.token_ids for output in outputs] == reference
    assert all(output.degraded is None for output in outputs)
    if compressor == "identity":
        assert all(output.accepted == output.drafted for output in outputs)
    drafter.engine.close()


def test_a_session_keeps_what_became_true(model: Path, reference: list[list[int]]) -> None:
    drafter = CompressedDrafter.from_pretrained(str(model), "identity")
    session = drafter.open(PROMPTS[0])
    tokens = reference[0]
    assert session.propose([], 6) == tokens[:6]
    session.check_integrity()
    wrong = (tokens[3] + 1) % tiny.VOCAB
    for committed in ([*tokens[:3], wrong], [*tokens[:3], wrong, 7], [*tokens[:3], wrong, 7, 8, 9]):
        fresh = drafter.open([*PROMPTS[0], *committed])
        assert session.propose(committed, 4) == fresh.propose([], 4)
        session.check_integrity()
        fresh.close()
    assert session.compressed_bytes > 0
    assert session._request.full.device_bytes == 0, "the drafter holds full KV"
    session.close()
    session.close()


def test_ties_are_asked_again(model: Path, reference: list[list[int]]) -> None:
    drafter = CompressedDrafter.from_pretrained(str(model), "identity")
    verifier = PlainVerifier(model, ties=[len(PROMPTS[0]) + 6, len(PROMPTS[0]) + 7])
    outputs = generate(PROMPTS[:1], 40, verifier, drafter, window=5)
    assert outputs[0].token_ids == reference[0]
    assert outputs[0].ties > 0


def test_ends(model: Path, reference: list[list[int]]) -> None:
    end = reference[0][11]
    first = reference[0].index(end)
    drafter = CompressedDrafter.from_pretrained(str(model), "identity")
    output = generate(PROMPTS[:1], 40, PlainVerifier(model), drafter, window=8, ends={end})[0]
    assert (output.token_ids, output.finish_reason) == (reference[0][: first + 1], "stop")


class Dying(PlainVerifier):
    """Fails for good once it has answered so often."""

    def __init__(self, folder: Path, answers: int, failure: Exception) -> None:
        super().__init__(folder)
        self.left, self.failure = answers, failure

    def verify(self, checks: Sequence[Check]) -> list[Verdict]:
        if self.left == 0:
            raise self.failure
        self.left -= 1
        return super().verify(checks)


@pytest.mark.parametrize("failure", [RemoteError("gone", cause="refused"), RuntimeError("engine core died")])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_verifier_that_dies_takes_no_token_with_it(
    model: Path, reference: list[list[int]], failure: Exception, *, drafts: bool
) -> None:
    drafter = CompressedDrafter.from_pretrained(str(model), "identity") if drafts else None
    end = reference[0][2]
    assert end not in reference[1][:20]
    done, cut = generate(PROMPTS, 40, Dying(model, 3, failure), drafter, window=5, ends={end})
    assert (done.finish_reason, done.error) == ("stop", None), "it was done before"
    assert done.token_ids == reference[0][: reference[0].index(end) + 1]
    assert cut.token_ids == reference[1][: 18 if drafts else 3]
    assert cut.finish_reason == "error"
    assert isinstance(cut.error, RemoteError)
    assert str(failure.args[0]) in str(cut.error)


def test_what_a_verifier_cannot_decide_ends_that_request_alone(model: Path, reference: list[list[int]]) -> None:
    class Undecided(PlainVerifier):
        def verify(self, checks: Sequence[Check]) -> list[Verdict]:
            at = len(PROMPTS[0]) + 5
            return [Verdict(0, None) if len(check.verified) == at else self._verdict(check) for check in checks]

    cut, whole = generate(PROMPTS, 12, Undecided(model))
    assert (cut.finish_reason, cut.token_ids) == ("error", reference[0][:5])
    assert "undecided" in str(cut.error)
    assert (whole.finish_reason, whole.token_ids) == ("length", reference[1][:12])


def test_too_few_verdicts_decide_nothing(model: Path) -> None:
    class Short(PlainVerifier):
        def verify(self, checks: Sequence[Check]) -> list[Verdict]:
            return super().verify(checks)[1:]

    outputs = generate(PROMPTS, 4, Short(model))
    assert [(output.finish_reason, output.token_ids) for output in outputs] == [("error", []), ("error", [])]


class Broken:
    """A drafter that fails at some call."""

    def __init__(self, good: CompressedDrafter, calls: int, error: Exception) -> None:
        self.good, self.calls, self.error = good, calls, error

    def open(self, prompt: Sequence[int]) -> Broken:
        self.session = self.good.open(prompt)
        return self

    def propose(self, committed: Sequence[int], count: int) -> list[int]:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.session.propose(committed, count)

    def close(self) -> None:
        self.session.close()


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), CompressorFault("no more"), KeyError("x")])
@pytest.mark.parametrize("calls", [0, 3])
def test_a_drafter_that_fails_costs_speed_only(model: Path, reference: list[list[int]], error: Exception, calls: int) -> None:
    drafter = Broken(CompressedDrafter.from_pretrained(str(model), "uniform"), calls, error)
    output = generate(PROMPTS[:1], 40, PlainVerifier(model), drafter, window=5)[0]
    assert output.token_ids == reference[0]
    assert output.degraded is not None
    assert str(error.args[0]) in output.degraded


class Careless:
    """A drafter that proposes ``tokens``, whatever it is asked for."""

    def __init__(self, tokens: Sequence[Any]) -> None:
        self.tokens = tokens

    def open(self, prompt: Sequence[int]) -> Careless:
        return self

    def propose(self, committed: Sequence[int], count: int) -> list[int]:
        return list(self.tokens)

    def close(self) -> None: ...


@pytest.mark.parametrize("tokens", [[5, tiny.VOCAB], [-1], [5] * 6, [1.0], [True], ["5"]])
def test_proposals_that_are_none_are_not_sent(model: Path, reference: list[list[int]], tokens: list[Any]) -> None:
    """A verifier would refuse the request for them, and with it what stands."""
    output = generate(PROMPTS[:1], 40, PlainVerifier(model), Careless(tokens), window=5)[0]
    assert output.token_ids == reference[0]
    assert "the drafter proposed" in str(output.degraded)
    assert output.drafted == 0


def test_prompts_are_checked_first(model: Path) -> None:
    verifier = PlainVerifier(model)
    with pytest.raises(PromptError, match="empty"):
        generate([[5], []], 4, verifier)
    with pytest.raises(PromptError, match="512"):
        generate([[5] * 510], 4, verifier)
    assert verifier.asked == 0
    assert generate([[5]], 0, verifier)[0].token_ids == []


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fly", "synthetic", "typical", "", None])
def test_lossy_rejection_methods_are_refused_by_name(method: Any) -> None:
    builders: list[Callable[[], Any]] = [
        lambda: speculative(method="ngram", num_speculative_tokens=3, rejection_sample_method=method),
        lambda: dtype_draft("model", "fp8", 3, rejection_sample_method=method),
        lambda: compressed_draft("model", "turboquant", {"bits": 4}, 3, rejection_sample_method=method),
    ]
    for build in builders:
        with pytest.raises(ConfigError, match="rejection_sample_method=" + repr(method)):
            build()


def test_exact_rejection_methods_pass() -> None:
    for method in EXACT_METHODS:
        assert speculative(method="ngram", rejection_sample_method=method)["speculative_config"]["method"] == "ngram"


def test_other_ways_to_lose_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        speculative(method="ngram", synthetic_acceptance_rates=[0.5])
    with pytest.raises(ConfigError, match="'fp8'"):
        refuse_lossy({}, cache_dtype="fp8")


@pytest.mark.parametrize(("name", "options"), [("snapkv", {"keep": 0.5}), ("random", {})])
def test_token_droppers_do_not_fit_vllms_draft_layers(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=name):
        compressed_draft("model", name, options, 3)
    with pytest.raises(OptionError, match=name):
        build_quantizer(name, options)


LAYER = LayerDescriptor(0, "full", 4, 2, 32, 32, torch.float32, 32**-0.5)


def test_rows_are_coded_alone() -> None:
    quantizer = RowQuantizer(build_quantizer("turboquant", {"bits": 4}), LAYER)
    keys, values = torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    together = quantizer.lossy(keys, values)
    assert all(part.shape == keys.shape and part.is_contiguous() for part in together)
    for token in range(7):
        alone = quantizer.lossy(keys[token : token + 1], values[token : token + 1])
        assert torch.equal(alone[0][0], together[0][token])
        assert torch.equal(alone[1][0], together[1][token])
    assert 0 < float((together[0] - keys).abs().max()) < 1
    with pytest.raises(OptionError, match="kivi"):
        RowQuantizer(build_quantizer("kivi", {"bits": 4}), LAYER)


@pytest.mark.parametrize("serde", [{"type": "fp8"}, "turboquant"])
def test_a_lossy_home_is_refused(monkeypatch: pytest.MonkeyPatch, serde: Any) -> None:
    exact = {"storage_manager": {"l2_adapter_config": {"adapters": [{"host": "h", "serde_config": None}]}}}
    monkeypatch.setattr(home, "fetch", lambda _, seconds: exact)
    home.require_exact("h:1")
    exact["storage_manager"]["l2_adapter_config"]["adapters"].append({"type": "fs", "serde_config": serde})
    with pytest.raises(ConfigError, match="bit for bit"):
        home.require_exact("h:1")


# -- compatibility ------------------------------------------------------------------------------------


@pytest.fixture
def unchecked() -> Any:
    compat._checked.cache_clear()
    yield
    compat._checked.cache_clear()


@pytest.mark.parametrize("part", sorted(HOOKS))
def test_the_hooks_are_what_they_were(unchecked: None, part: str) -> None:
    require_compatible(part)


def signatures() -> list[tuple[str, Hook]]:
    return [(part, hook) for part, hooks in HOOKS.items() for hook in hooks]


@pytest.mark.parametrize(("part", "hook"), signatures(), ids=[hook.path for _, hook in signatures()])
def test_every_changed_hook_is_named(unchecked: None, monkeypatch: pytest.MonkeyPatch, part: str, hook: Hook) -> None:
    """Expecting one thing more of a hook is the same as finding one thing less."""
    if hook.parameters is not None:
        other = dataclasses.replace(hook, parameters=(*hook.parameters, "something_new"))
    else:
        other = dataclasses.replace(hook, fields=(*hook.fields, "something_new"))
    changed = tuple(other if each is hook else each for each in HOOKS[part])
    monkeypatch.setitem(HOOKS, part, changed)
    with pytest.raises(IncompatibleEngineError) as refused:
        require_compatible(part)
    assert hook.path in str(refused.value)
    assert "something_new" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_changed_signature_is_refused_at_start(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    from vericache_vllm.connector import VeriCacheConnector

    def changed(self: Any, request: Any, num_computed_tokens: int, priority: int) -> None: ...

    monkeypatch.setattr(LMCacheMPConnector, "get_num_new_matched_tokens", changed)
    with pytest.raises(IncompatibleEngineError, match="get_num_new_matched_tokens"):
        VeriCacheConnector(None, None, None)


def test_a_hook_that_is_gone_is_named() -> None:
    assert "nothing" in str(difference(Hook("vllm.config:nothing")))
    assert "no_such_module" in str(difference(Hook("vllm.no_such_module:nothing")))


@pytest.mark.parametrize("release", ["0.31.4", "0.34.0", "1.0.0", "unknown"])
def test_other_releases_are_refused(unchecked: None, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(compat, "release_of", lambda _: release)
    with pytest.raises(IncompatibleEngineError, match=release):
        require_compatible("verifier")


# -- vLLM's ranks -------------------------------------------------------------------------------------


def test_ranks_sleep_between_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    assert waiting.wait_passively()
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: pytest.fail("it spins"))
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    try:
        writer = shm_broadcast.SpinCondition(False, context, address)
        reader = shm_broadcast.SpinCondition(True, context, address, busy_loop_s=3600.0)
        reader.last_read -= 3601.0  # as after an hour
        reader.record_read()
        reader.wait(timeout_ms=200)  # also the time that the two sockets need to meet
        writer.notify()
        reader.wait(timeout_ms=10_000)
        with pytest.raises(zmq.Again):
            reader.local_notify_socket.recv(flags=zmq.NOBLOCK)  # the message that woke it is gone
    finally:
        context.destroy(linger=0)


# -- vLLM's dispatcher --------------------------------------------------------------------------------


def test_the_dispatcher_is_mended_where_it_is_broken() -> None:
    from vllm.triton_utils import dispatcher

    vars(dispatcher).pop("vars", None)
    assert plugin._is_broken(dispatcher)
    assert plugin.mend_dispatcher()
    assert not plugin._is_broken(dispatcher)
    assert not plugin.mend_dispatcher(), "a second process start must change nothing"
    assert "vericache_vllm._canary" not in sys.modules


def test_a_mended_dispatcher_still_rebinds() -> None:
    import types

    from vllm.triton_utils import dispatcher

    plugin.mend_dispatcher()
    kernel, holder = (lambda: None), types.ModuleType("vericache_vllm._holder")
    owner = types.SimpleNamespace(kernel=kernel)
    holder.copied, holder.owner = kernel, owner  # type: ignore[attr-defined]
    sys.modules[holder.__name__] = holder
    try:
        wrapper = object()
        dispatcher._rebind_kernels([(kernel, wrapper)])
        assert holder.copied is wrapper
        assert owner.kernel is wrapper
    finally:
        del sys.modules[holder.__name__]


# -- the environment ----------------------------------------------------------------------------------


def test_requirements_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    lines = ["Name: x", "Requires-Dist: torch==2.13.0+cpu", "Requires-Dist: torchvision", "Requires-Dist: numpy>=1"]
    lines += ['Requires-Dist: extra-only; extra == "z"', 'Requires-Dist: never; python_version < "3"']
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "\n".join(lines))
    script = Path(__file__).parent.parent / "requirements_of.py"
    done = subprocess.run([sys.executable, script, wheel, "torch*"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numpy>=1"]


def test_the_connector_is_configured_as_json() -> None:
    from vericache_vllm.offline import kv_transfer_config

    config = json.loads(json.dumps(kv_transfer_config("[::1]:5555")))
    extra = config["kv_connector_extra_config"]
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://[::1]", 5555)
