"""Names such as ``snapkv+kivi``: which parts they have, and whose option is whose. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vericache_core.errors import OptionError, UnknownCompressorError
from vericache_core.plugins.spec import is_valid_name

JOINER: Final = "+"
_BUDGET: Final = ("keep", "keep_tokens")


def is_composed(name: str) -> bool:
    """Whether ``name`` means several compressors in a row."""
    return JOINER in name


def parts_of(name: str) -> tuple[str, str]:
    """``"snapkv+kivi"`` -> ``("snapkv", "kivi")``.

    Raises:
        UnknownCompressorError: not two names joined by one plus sign.
    """
    parts = tuple(part.strip() for part in name.split(JOINER))
    if len(parts) != 2 or not all(map(is_valid_name, parts)):
        raise UnknownCompressorError(
            f"{name!r} is no composition of compressors", hint="write DROPPER+QUANTIZER, such as 'snapkv+kivi'"
        )
    return parts[0], parts[1]


def split_options(parts: Sequence[str], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hand each part its own options.

    ``snapkv.keep`` goes to ``snapkv``, as does ``keep`` inside a table ``snapkv``; plain ``keep`` and
    ``keep_tokens`` go to the first part, which drops tokens. A value that is given later replaces an earlier one.

    Raises:
        OptionError: an option addressed to nobody, or a budget given both plainly and by address.
    """
    known = {part.replace("-", "_"): number for number, part in enumerate(parts)}
    found: list[dict[str, Any]] = [{} for _ in parts]
    plain: dict[str, Any] = {}
    for name, value in given.items():
        owner, dot, rest = name.partition(".")
        at = known.get(owner.replace("-", "_"))
        if at is not None and dot:
            found[at][rest.replace("-", "_")] = value
        elif at is not None and isinstance(value, Mapping):
            found[at].update({key.replace("-", "_"): item for key, item in value.items()})
        elif name.replace("-", "_") in _BUDGET:
            plain[name.replace("-", "_")] = value
        else:
            example = f"{parts[0]}.{rest or name}"
            raise OptionError(
                f"option {name!r} does not say whose it is",
                cause=f"the compressor is {JOINER.join(parts)}",
                hint=f"write {example} or {parts[-1]}.{rest or name}",
            )
    if plain and any(found[0].get(name) is not None for name in _BUDGET):
        raise OptionError(f"{next(iter(plain))} is given beside a budget of {parts[0]}", hint="give only one")
    found[0].update(plain)
    return found
