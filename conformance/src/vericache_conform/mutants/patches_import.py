"""Replaces an attention function of transformers when it is imported."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vericache_conform.mutants.healthy import Drop, spec

_original = ALL_ATTENTION_FUNCTIONS["sdpa"]


def _patched(*arguments: Any, **named: Any) -> Any:
    return _original(*arguments, **named)


ALL_ATTENTION_FUNCTIONS.register("sdpa", _patched)


class PatchesOnImport(Drop):
    name = "patches-on-import"


PATCHES_ON_IMPORT = spec(PatchesOnImport)
