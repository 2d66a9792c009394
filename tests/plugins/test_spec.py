from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vericache_core.errors import PluginLoadError
from vericache_core.plugins.options import Budget
from vericache_core.plugins.spec import API_VERSION, CAPABILITIES, SUPPORTED_API_VERSIONS, CompressorSpec, is_valid_name


def make(**changes: Any) -> CompressorSpec:
    fields: dict[str, Any] = {
        "name": "some-name",
        "factory": Budget,
        "options": Budget,
        "kind": "token-drop",
        "api_version": 1,
        "summary": "one line",
        "capabilities": {"extend": "yes"},
    }
    return CompressorSpec(**(fields | changes))


@pytest.mark.parametrize("name", ["a", "snapkv", "a1", "my-method", "kv2-x-3"])
def test_good_names(name: str) -> None:
    assert make(name=name).name == name


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a--b", "-a", "a-", "a b", "a+b", "snapkv\n", "é", None, 3])
def test_bad_names(name: Any) -> None:
    assert not is_valid_name(name)
    with pytest.raises(PluginLoadError, match="not a compressor name"):
        make(name=name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"factory": 3}, "factory"),
        ({"options": dict}, "options"),
        ({"options": Budget()}, "options"),
        ({"kind": "quantize"}, "kind"),
        ({"api_version": 0}, "api_version"),
        ({"api_version": "1"}, "api_version"),
        ({"api_version": True}, "api_version"),
        ({"summary": "two\nlines"}, "summary"),
        ({"summary": None}, "summary"),
        ({"capabilities": {"extends": "yes"}}, "did you mean 'extend'"),
        ({"capabilities": {"extend": True}}, "must be yes, no or unknown"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginLoadError, match=reason):
        make(**changes)


def test_capabilities_have_defaults_and_cannot_be_changed_later() -> None:
    given: dict[str, Any] = {"extend": "yes"}
    spec = make(capabilities=given)
    given["extend"] = "no"
    assert spec.capability("extend") == "yes"
    assert spec.capability("sliding_window") == "no"
    assert spec.capability("rollback") == "unknown"
    assert all(meaning for _, meaning in CAPABILITIES.values())


def test_a_spec_is_frozen_hashable_and_comparable() -> None:
    spec = make()
    assert spec == make()
    assert len({spec, make()}) == 1
    assert spec != make(name="other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "x"  # type: ignore[misc]  # the point of the test


def test_this_and_the_previous_contract_are_accepted() -> None:
    assert tuple(v for v in (API_VERSION - 1, API_VERSION) if v >= 1) == SUPPORTED_API_VERSIONS
