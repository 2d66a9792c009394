from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_core.errors import OptionError
from vericache_core.plugins.fields import coerce, option_fields, parse_pairs
from vericache_core.plugins.options import Budget, Options, kept_tokens, option, options_to_json, parse_options
from vericache_core.plugins.schema import field_schema, options_schema


@dataclass(frozen=True)
class Sample(Options):
    bits: int = option(4, help="bits per value", unit="bits", choices=(2, 4, 8))
    group: int = option(32, help="values per scale", ge=1)
    power: float = option(1.0, help="exponent", gt=0, lt=10)
    shift: float = option(0.0, help="unbounded")
    fast: bool = option(False, help="be quick")
    mode: Literal["sum", "mean"] = option("mean", help="reducer")
    level: Literal[1, 2] = option(1, help="level")
    seed: int | None = option(None, help="seed", ge=0)
    label: str = option("", help="free text")
    layers: tuple[int, ...] = option((), help="layers", ge=0)


@dataclass(frozen=True)
class Half(Budget):
    default_keep: ClassVar[float] = 0.5


def test_command_line_strings_become_the_fields_types() -> None:
    given_ = {
        "bits": "2",
        "power": "0.5",
        "fast": "yes",
        "mode": "sum",
        "level": "2",
        "seed": "none",
        "label": "7",
        "layers": "0, 3",
    }
    assert parse_options(Sample, given_) == Sample(
        bits=2, power=0.5, fast=True, mode="sum", level=2, seed=None, label="7", layers=(0, 3)
    )


def test_dashes_and_underscores_name_the_same_option() -> None:
    assert parse_options(Half, {"keep-tokens": "3"}).keep_tokens == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", 3), ("bits", "3"), ("bits", 4.0), ("bits", True), ("bits", None), ("bits", "4.0"),
        ("group", 0), ("group", "-1"), ("group", "many"),
        ("power", 0), ("power", 10), ("power", "nan"), ("power", float("nan")), ("power", "inf"), ("power", 10**400),
        ("power", True), ("shift", "nan"), ("shift", float("inf")),
        ("shift", "-inf"), ("fast", 1), ("fast", "maybe"), ("mode", "max"), ("level", True), ("level", "1.0"),
        ("seed", -1), ("label", 3), ("layers", [0, -1]), ("layers", "0,x"), ("layers", 3),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name}: expected"):
        parse_options(Sample, {name: value})


@pytest.mark.parametrize("value", [3, "4", 4.0, True])
def test_direct_construction_is_checked_too_and_takes_no_strings(value: Any) -> None:
    with pytest.raises(OptionError, match="bits: expected one of 2, 4, 8, got"):
        Sample(bits=value)


def test_an_int_in_a_float_field_becomes_a_float() -> None:
    assert type(Sample(power=2).power) is float


def test_unknown_option_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(OptionError, match="did you mean 'group'") as caught:
        parse_options(Sample, {"gruop": 1})
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in option_fields(Sample))


def test_a_budget_for_a_compressor_without_one_is_explained() -> None:
    with pytest.raises(OptionError, match="drops no tokens"):
        parse_options(Sample, {"keep": 0.5})


def test_a_plugins_own_rule_becomes_an_option_error() -> None:
    @dataclass(frozen=True)
    class Picky(Options):
        group: int = option(32, help="values per scale")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group % 8:
                raise ValueError("group must be a multiple of 8")

    with pytest.raises(OptionError, match="multiple of 8"):
        parse_options(Picky, {"group": "9"})


def test_a_plain_frozen_dataclass_is_enough() -> None:
    @dataclass(frozen=True)
    class Plain:
        size: int = 3

    assert parse_options(Plain, {"size": "5"}) == Plain(5)


def test_unusable_options_types_are_refused() -> None:
    @dataclass
    class Mutable:
        size: int = 3

    @dataclass(frozen=True)
    class NoDefault:
        size: int

    @dataclass(frozen=True)
    class Strange:
        size: complex = 3j

    @dataclass
    class MutableChild:
        size: int = 3

    for bad in (Mutable, NoDefault, Strange, MutableChild, int, 3):
        with pytest.raises(TypeError):
            option_fields(bad)


_SAMPLES = st.builds(
    Sample,
    bits=st.sampled_from([2, 4, 8]),
    group=st.integers(1, 4096),
    power=st.floats(0, 10, exclude_min=True, exclude_max=True),
    fast=st.booleans(),
    mode=st.sampled_from(["sum", "mean"]),
    seed=st.none() | st.integers(0, 2**63),
    label=st.text(max_size=5),
    layers=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@given(_SAMPLES)
def test_json_round_trip(sample: Sample) -> None:
    assert parse_options(Sample, json.loads(json.dumps(options_to_json(sample)))) == sample


def test_schema_carries_types_ranges_defaults_and_help() -> None:
    schema = options_schema(Sample)
    properties = schema["properties"]
    assert schema["additionalProperties"] is False
    assert list(properties) == list(option_fields(Sample))
    assert properties["bits"] == {"type": "integer", "enum": [2, 4, 8], "description": "bits per value [bits]", "default": 4}
    assert properties["power"]["exclusiveMinimum"] == 0
    assert properties["power"]["exclusiveMaximum"] == 10
    assert properties["seed"]["type"] == ["integer", "null"]
    assert properties["layers"] == {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "description": "layers",
        "default": [],
    }
    assert "not" in options_schema(Half)
    json.dumps(schema)


def test_pairs() -> None:
    assert parse_pairs(["a-b=1", "c=x=y"]) == {"a_b": "1", "c": "x=y"}
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ValueError, match=r"key=value|twice"):
            parse_pairs(bad)


# -- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "keep", "expected"),
    [
        (100, 0.1, 10),
        (10, 0.1, 1),
        (10, 0.9, 9),
        (3, 0.01, 1),
        (1000, 0.001, 1),
        (7, 1.0, 7),
        (0, 0.5, 0),
        (1, 0.5, 1),
        (30, 0.3, 9),
    ],
)
def test_keep_counts(tokens: int, keep: float, expected: int) -> None:
    assert Budget(keep=keep).kept_tokens(tokens) == expected


def test_every_hundredth_of_a_hundred_is_exact() -> None:
    """Binary floats fail this: ``int(0.29 * 100)`` is 28."""
    assert [Budget(keep=percent / 100).kept_tokens(100) for percent in range(1, 101)] == list(range(1, 101))


@given(st.integers(0, 10**7), st.integers(1, 10_000))
def test_keep_is_exact_integer_arithmetic(tokens: int, ten_thousandths: int) -> None:
    count = Budget(keep=ten_thousandths / 10_000).kept_tokens(tokens)
    assert count == min(max(tokens * ten_thousandths // 10_000, 1), tokens)


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_min=True))
def test_never_zero_never_more_than_there_are_and_monotone(tokens: int, keep: float) -> None:
    budget = Budget(keep=keep)
    count = budget.kept_tokens(tokens)
    assert 1 <= count <= tokens
    assert count <= budget.kept_tokens(tokens + 1)
    assert count - 1 <= Fraction(str(keep)) * tokens


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_keep_tokens_is_clamped(tokens: int, wanted: int) -> None:
    assert Budget(keep_tokens=wanted).kept_tokens(tokens) == min(tokens, wanted)


def test_the_default_budget_is_the_subclasss_and_leaves_room_for_keep_tokens() -> None:
    assert Budget().kept_tokens(100) == 25
    assert Half().kept_tokens(100) == 50
    assert parse_options(Half, {"keep_tokens": "7"}).kept_tokens(100) == 7


@pytest.mark.parametrize(
    "bad", [{"keep": 0}, {"keep": 1.01}, {"keep": -0.5}, {"keep_tokens": 0}, {"keep": 0.5, "keep_tokens": 3}]
)
def test_bad_budgets(bad: Mapping[str, Any]) -> None:
    with pytest.raises(OptionError):
        Budget(**bad)


def test_kept_tokens_function_needs_exactly_one_and_no_negative_count() -> None:
    with pytest.raises(OptionError):
        kept_tokens(3)
    with pytest.raises(OptionError):
        kept_tokens(3, keep=0.5, keep_tokens=1)
    with pytest.raises(ValueError, match="negative"):
        kept_tokens(-1, keep=0.5)


def test_a_number_or_a_word() -> None:
    @dataclass(frozen=True)
    class Numbers:
        window: int | Literal["auto"] = option(8, help="tokens", ge=1)

    field = option_fields(Numbers)["window"]
    assert coerce(field, "auto", text=False) == "auto"
    assert coerce(field, "3", text=True) == 3
    assert coerce(field, 3, text=False) == 3
    for wrong in ("x", 0, True, None, 1.5):
        with pytest.raises(OptionError, match="an integer >= 1 or auto"):
            coerce(field, wrong, text=False)
    assert field_schema(field)["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "string", "enum": ["auto"]}]
