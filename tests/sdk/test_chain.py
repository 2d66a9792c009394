from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sdk.making import NormDropper, RoundQuantizer, cache, descriptor, stored_bytes, view
from vericache_core.attention.online import AttentionState
from vericache_core.builtin import IdentityOptions
from vericache_core.chain import ChainCompressor, rectangular
from vericache_core.coded import CodedLayer
from vericache_core.context import CompressContext
from vericache_core.errors import CompressorFault, OptionError, UnknownCompressorError, UsageError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, LayerDescriptor, PlainLayer
from vericache_core.plugins.fields import option_fields
from vericache_core.plugins.options import Budget, options_to_json, parse_options
from vericache_core.plugins.registry import Registry, default_registry
from vericache_core.plugins.schema import options_schema
from vericache_core.plugins.spec import API_VERSION, CompressorSpec

LAYERS = [descriptor(0), descriptor(1, window=8), descriptor(2, kv_heads=1, head_dim=8, value_dim=12, dtype=torch.bfloat16)]
CONTEXT = CompressContext()
NAME = "random+adversarial"


def chain(keep: float = 0.5) -> ChainCompressor:
    return ChainCompressor(NormDropper(Budget(keep=keep)), RoundQuantizer(unit=2, residual=6))


def coded(compressed: CompressedKV, layer: int) -> CodedLayer:
    held = compressed.layers[layer]
    assert isinstance(held, CodedLayer)
    return held


def test_survivors_are_those_of_the_dropper_and_codes_those_of_the_quantizer_over_them() -> None:
    kv = cache(LAYERS, 41)
    made = chain().compress(view(LAYERS, kv, 0, 41), CONTEXT)
    dropped = NormDropper(Budget(keep=0.5)).compress(view(LAYERS, kv, 0, 41), CONTEXT)
    assert made.surviving == dropped.surviving
    assert made.layers[1] is None
    made.check_integrity()
    for index in (0, 2):
        held = dropped.layers[index]
        assert isinstance(held, PlainLayer)
        rows = [held.head(h) for h in range(held.surviving.kv_heads)]
        keys, values = torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])
        alone = RoundQuantizer(unit=2, residual=6).compress(
            view([descriptor(0, **_facts(LAYERS[index]))], ([keys], [values]), 0, keys.shape[1]), CONTEXT
        )
        for name, part in coded(made, index).tensors().items():
            assert torch.equal(part, coded(alone, 0).tensors()[name]), name
        assert made.residual(index) is None


def _facts(layer: LayerDescriptor) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("kv_heads", "head_dim", "value_dim", "dtype")}


def test_attention_is_that_over_the_decoded_survivors() -> None:
    kv = cache(LAYERS, 41)
    held = coded(chain().compress(view(LAYERS, kv, 0, 41), CONTEXT), 0)
    query = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(5))
    state, expected = (AttentionState.fresh(4, 3, 16, query.device) for _ in range(2))
    held.attend(query, state)
    expected.fold(query, held.keys.decoded(), held.values.decoded())
    torch.testing.assert_close(state.acc / state.total.unsqueeze(-1), expected.acc / expected.total.unsqueeze(-1))


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 5]])
def test_tokens_that_arrive_later_are_appended_to_the_codes(pieces: list[int]) -> None:
    kv, compressor = cache(LAYERS, 50), chain()
    made = compressor.compress(view(LAYERS, kv, 0, 41), CONTEXT)
    for count in pieces:
        made = compressor.extend(made, view(LAYERS, kv, made.tokens, made.tokens + count), CONTEXT)
    made.check_integrity()
    first = compressor.compress(view(LAYERS, kv, 0, 41), CONTEXT)
    for index in (0, 2):
        held, before = coded(made, index), coded(first, index)
        assert held.surviving == before.surviving.grown(9)
        kept = [held.surviving.head(h) for h in range(held.surviving.kv_heads)]
        keys = torch.stack([kv[0][index][h][at] for h, at in enumerate(kept)])
        values = torch.stack([kv[1][index][h][at] for h, at in enumerate(kept)])
        again = RoundQuantizer(unit=2, residual=6).encode_layer(LAYERS[index], keys, values, held.surviving)
        assert {n: t.tolist() for n, t in again.tensors().items()} == {n: t.tolist() for n, t in held.tensors().items()}


@pytest.mark.parametrize("with_prefix", [True, False])
def test_rolling_back_what_was_appended(with_prefix: bool) -> None:
    kv, compressor = cache(LAYERS, 50), chain()
    first = compressor.compress(view(LAYERS, kv, 0, 41), CONTEXT)
    longer = compressor.extend(first, view(LAYERS, kv, 41, 50), CONTEXT)
    back = compressor.rollback(longer, 9, view(LAYERS, kv, 0, 41) if with_prefix else None)
    back.check_integrity()
    assert back.surviving == first.surviving
    if with_prefix:
        assert stored_bytes(back) == stored_bytes(first)


def test_rolling_back_into_the_prompt_needs_the_full_kv() -> None:
    kv, compressor = cache(LAYERS, 41), chain()
    made = compressor.compress(view(LAYERS, kv, 0, 41), CONTEXT)
    left = next(n for n in range(40, 0, -1) if len(set(coded(made, 0).surviving.cut(n).counts)) > 1)
    with pytest.raises(CompressorFault, match="without the full KV"):
        compressor.rollback(made, 41 - left)
    back = compressor.rollback(made, 41 - left, view(LAYERS, kv, 0, left))
    back.check_integrity()
    assert set(coded(back, 0).surviving.counts) == {max(coded(made, 0).surviving.cut(left).counts)}
    compressor.rollback(made, 41, view(LAYERS, kv, 0, 0)).check_integrity()


def test_heads_that_keep_fewer_get_their_newest_dropped_positions_too() -> None:
    assert rectangular(HeadMap([torch.tensor([0, 5, 7]), torch.tensor([6])], 8)) == HeadMap(
        [torch.tensor([0, 5, 7]), torch.tensor([5, 6, 7])], 8
    )
    even = HeadMap([torch.tensor([0]), torch.tensor([3])], 4)
    assert rectangular(even) is even
    assert rectangular(HeadMap([torch.tensor([], dtype=torch.int64)] * 2, 3)).counts == (1, 1)


class Uneven(NormDropper):
    """Head ``h`` keeps ``2 + 3 h`` tokens."""

    def allocate(self, layers: Any, scores: Any, tokens: int, context: CompressContext) -> list[list[int]]:
        return [[2 + 3 * h for h in range(layer.kv_heads)] for layer in layers]


def test_uneven_heads_become_a_rectangle_that_holds_every_survivor() -> None:
    kv = cache(LAYERS, 41)
    made = ChainCompressor(Uneven(), RoundQuantizer()).compress(view(LAYERS, kv, 0, 41), CONTEXT)
    dropped = Uneven().compress(view(LAYERS, kv, 0, 41), CONTEXT)
    assert coded(made, 0).surviving.counts == (5, 5)
    assert dropped.layers[0] is not None
    for h in range(2):
        assert set(dropped.layers[0].surviving.head(h).tolist()) <= set(coded(made, 0).surviving.head(h).tolist())


class Unsorted(NormDropper):
    """Scores so that the newest tokens are the best."""

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return torch.arange(keys.shape[1]).float().expand(keys.shape[:2])


def test_rows_are_encoded_in_ascending_order_of_position() -> None:
    kv = cache(LAYERS, 20)
    made = ChainCompressor(Unsorted(Budget(keep_tokens=6)), RoundQuantizer(residual=100)).compress(
        view(LAYERS, kv, 0, 20), CONTEXT
    )
    assert torch.equal(coded(made, 0).keys.exact, kv[0][0][:, 14:])


# -- by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "0.5", "adversarial.seed": "3"},
        {"random.keep": 0.5, "adversarial.seed": 3},
        {"random": {"keep": 0.5}, "adversarial": {"seed": 3}},
        {"random": {"keep": 0.9}, "adversarial.seed": 3, "random.keep": 0.5},
    ],
)
def test_options_find_their_part(options: dict[str, Any]) -> None:
    made = Registry(discover=False).create(NAME, options)
    assert isinstance(made, ChainCompressor)
    assert made.name == NAME
    assert made.dropper.options.keep == 0.5  # type: ignore[attr-defined]
    assert made.quantizer.options.seed == 3
    Registry(discover=False).check_options(NAME, options)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (NAME, {"seed": 1}, OptionError, r"does not say whose.*random\.seed"),
        (NAME, {"snapkv.keep": 1}, OptionError, "does not say whose"),
        (NAME, {"keep": 0.5, "random.keep_tokens": 3}, OptionError, "beside a budget of random"),
        (NAME, {"random.kep": 0.5}, OptionError, "did you mean 'keep'"),
        ("adversarial+random", {}, UsageError, "'adversarial' cannot come first.*a token-drop"),
        ("random+random", {}, UsageError, "'random' cannot come last"),
        ("random+", {}, UnknownCompressorError, r"DROPPER\+QUANTIZER"),
        ("random+adversarial+adversarial", {}, UnknownCompressorError, r"DROPPER\+QUANTIZER"),
        ("random+nothing", {}, UnknownCompressorError, "'nothing'"),
    ],
)
def test_what_cannot_be_chained_is_refused_by_name(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Registry(discover=False).create(name, options)


def test_the_descriptor_of_a_composition_is_derived_from_its_parts() -> None:
    registry = Registry(discover=False)
    spec = registry.spec(NAME)
    assert (spec.name, spec.kind, spec.api_version) == (NAME, "hybrid", 1)
    first, last = (registry.spec(part) for part in ("random", "adversarial"))
    fields = option_fields(spec.options)
    assert set(fields) == {f"{part.name}.{name}" for part in (first, last) for name in option_fields(part.options)}
    assert fields["random.seed"] == replace(option_fields(first.options)["seed"], name="random.seed")
    assert set(options_schema(spec.options)["properties"]) == set(fields)
    with pytest.raises(UsageError, match=r"cannot come first.*hint: a chain is DROPPER\+QUANTIZER"):
        registry.spec("adversarial+random")


@pytest.mark.parametrize(
    ("capability", "first", "last", "together"),
    [
        ("sliding_window", "yes", "no", "yes"),
        ("nonfinite_input", "no", "yes", "no"),
        ("rollback", "yes", "no", "no"),
        ("extend", "no", "yes", "yes"),
        ("partial_rotary", "unknown", "yes", "unknown"),
        ("residual", "no", "unknown", "no"),
    ],
)
def test_capabilities_of_a_composition(capability: str, first: Any, last: Any, together: str) -> None:
    parts = [
        CompressorSpec("norm", NormDropper, Budget, "token-drop", API_VERSION, "", {capability: first}),
        CompressorSpec(
            "round", lambda _: RoundQuantizer(), IdentityOptions, "quantization", API_VERSION, "", {capability: last}
        ),
    ]
    registry = Registry(discover=False)
    for part in parts:
        registry.register(part)
    assert registry.spec("norm+round").capability(capability) == together


def test_options_of_a_composition_are_checked_and_survive_json() -> None:
    registry = Registry(discover=False)
    kind = registry.spec(NAME).options
    made = parse_options(kind, {"random.keep": "0.4", "adversarial.seed": 2})
    assert made.parts[0].keep == 0.4
    assert getattr(made, "adversarial.seed") == made.parts[1].seed == 2
    again = parse_options(kind, json.loads(json.dumps(options_to_json(made))))
    assert again == made
    assert hash(again) == hash(made)
    assert made != parse_options(kind, {"random.keep": 0.4})
    with pytest.raises(FrozenInstanceError):
        made.parts = ()
    with pytest.raises(OptionError, match=r"random\.keep"):
        parse_options(kind, {"random.keep": 2})
    with pytest.raises(OptionError, match="both given"):
        parse_options(kind, {"random.keep": 0.4, "random.keep_tokens": 3})
    built = registry.create(NAME, made)
    assert isinstance(built, ChainCompressor)
    assert (built.dropper.options.keep, built.quantizer.options.seed) == (0.4, 2)  # type: ignore[attr-defined]


def test_standing_of_a_composition() -> None:
    assert Registry(discover=False).conformance(NAME).standing == "unverified"


def made_by_name(tokens: int = 67) -> CompressedKV:
    compressor = default_registry().create(NAME, {"keep": 0.4, "random.seed": 4, "adversarial.seed": 2})
    kv = cache(LAYERS, tokens)
    first = compressor.compress(view(LAYERS, kv, 0, tokens - 7), CONTEXT)
    return compressor.extend(first, view(LAYERS, kv, tokens - 7, tokens), CONTEXT)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.sdk.test_chain import made_by_name
from vericache_core.kv import CompressedKV
data = sys.stdin.buffer.read()
again = CompressedKV.from_payload(data)
again.check_integrity()
assert again.to_payload() == data
assert made_by_name().to_payload() == data
print("equal")
"""


def test_a_fresh_process_reads_and_makes_the_same_payload(pytestconfig: pytest.Config) -> None:
    made = made_by_name()
    data = made.to_payload()
    assert stored_bytes(CompressedKV.from_payload(data)) == stored_bytes(made)
    command = [sys.executable, "-c", CHILD, str(pytestconfig.rootpath)]
    child = subprocess.run(command, input=data, capture_output=True, check=False)
    assert child.stdout.strip() == b"equal", child.stderr.decode()
