"""Names such as ``snapkv+kivi``: which parts they have, whose option is whose, and what describes the whole.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vericache_core.errors import OptionError, UnknownCompressorError, UsageError
from vericache_core.plugins.spec import CAPABILITIES, CompressorSpec, Support, is_valid_name

if TYPE_CHECKING:
    from vericache_core.compressor import Compressor

JOINER: Final = "+"
_BUDGET: Final = ("keep", "keep_tokens")
_PLACES: Final = (("token-drop", "first"), ("quantization", "last"))
_ORDER: Final[tuple[Support, ...]] = ("no", "unknown", "yes")


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


class ComposedOptions:
    """Options of a composition: a field for every option of a part, called as a user writes it (``snapkv.keep``).

    :func:`composed_options` makes a dataclass of it for two parts.

    Attributes:
        parts: the options of each part, which have been checked by their own types.
    """

    homes: ClassVar[Mapping[str, tuple[int, str]]] = {}
    types: ClassVar[tuple[type[Any], ...]] = ()
    parts: tuple[Any, ...]

    def __init__(self, **values: Any) -> None:
        own: list[dict[str, Any]] = [{} for _ in self.types]
        for name, value in values.items():
            at, inner = self.homes[name]
            own[at][inner] = value
        # object.__setattr__ because the subclasses are frozen; a name with a dot can be set in no other way.
        object.__setattr__(self, "parts", tuple(kind(**mine) for kind, mine in zip(self.types, own, strict=True)))
        for name, (at, inner) in self.homes.items():
            object.__setattr__(self, name, getattr(self.parts[at], inner))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComposedOptions) and self.homes == other.homes and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({JOINER.join(map(repr, self.parts))})"


def composed_options(parts: Sequence[str], types: Sequence[type[Any]]) -> type[ComposedOptions]:
    """The options type of a composition."""
    homes: dict[str, tuple[int, str]] = {}
    body: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    for at, (part, kind) in enumerate(zip(parts, types, strict=True)):
        known = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            name = f"{part.replace('-', '_')}.{field.name}"
            homes[name], hints[name] = (at, field.name), known[field.name]
            default: dict[str, Any] = (
                {"default": field.default}
                if field.default is not dataclasses.MISSING
                else {"default_factory": field.default_factory}
            )
            body[name] = dataclasses.field(metadata=field.metadata, **default)
    body |= {"__annotations__": hints, "homes": homes, "types": tuple(types), "__module__": __name__}
    made = type(f"Options({JOINER.join(parts)})", (ComposedOptions,), body)
    # Only the fields are wanted: code that dataclass writes would take the dots in their names for attributes.
    return dataclass(frozen=True, init=False, repr=False, eq=False)(made)


@dataclass(frozen=True, slots=True)
class ComposedSpec(CompressorSpec):
    """The descriptor of a composition, derived from those of its parts."""

    def _well_named(self) -> bool:
        return all(map(is_valid_name, self.name.split(JOINER)))


def composed_spec(name: str, parts: Sequence[CompressorSpec], factory: Callable[[Any], Compressor]) -> ComposedSpec:
    """Describe the composition ``name`` of two compressors.

    Raises:
        UsageError: the first does not drop tokens, or the last does not quantize.
    """
    for spec, (kind, place) in zip(parts, _PLACES, strict=True):
        if spec.kind != kind:
            raise UsageError(
                f"{spec.name!r} cannot come {place} in {name!r}",
                cause=f"its kind is {spec.kind}, a {kind} compressor comes {place}",
                hint="a chain is DROPPER+QUANTIZER, such as snapkv+kivi; `vericache plugins show NAME` tells the kind",
            )
    return ComposedSpec(
        name,
        factory,
        composed_options([spec.name for spec in parts], [spec.options for spec in parts]),
        "hybrid",
        min(spec.api_version for spec in parts),
        f"{parts[0].name}, and {parts[-1].name} for what survives",
        {capability: _combined(capability, parts) for capability in CAPABILITIES},
    )


def _combined(capability: str, parts: Sequence[CompressorSpec]) -> Support:
    each = [spec.capability(capability) for spec in parts]
    if capability == "sliding_window":  # a layer that one part alone supports gets that part's treatment
        return max(each, key=_ORDER.index)
    if capability == "nonfinite_input":  # what the first one drops the last one never sees
        return each[0]
    if capability in ("extend", "rollback"):  # later tokens all survive, so only the codes grow and shrink
        return each[-1]
    return min(each, key=_ORDER.index)
