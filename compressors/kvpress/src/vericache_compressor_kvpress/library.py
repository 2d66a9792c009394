"""kvpress, imported without letting it change transformers."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from vericache_compressor_kvpress.options import KvpressOptions
from vericache_compressor_kvpress.table import PRESSES, SHORTEST
from vericache_core.errors import MissingDependencyError, OptionError


def kvpress() -> Any:
    """The module.

    Importing it wraps every attention function that transformers knows, for masks that VeriCache has no use for;
    the functions are put back. What it logs goes where the program's own handlers say, and nowhere without any.

    Raises:
        MissingDependencyError: it is not installed or cannot be imported here.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    logger = logging.getLogger("kvpress")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # some presses warn about themselves whenever they are built
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its dependencies, about themselves
            return importlib.import_module("kvpress")
    except ImportError as error:
        raise MissingDependencyError(
            "kvpress cannot be imported", cause=str(error), hint="pip install kvpress; it pins transformers below 5.3"
        ) from error
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function


def build_press(name: str, options: KvpressOptions) -> Any:
    """The press that ``kvpress-<name>`` stands for, without a budget.

    Raises:
        OptionError: an argument or inner press that it does not take.
    """
    library, entry = kvpress(), PRESSES[name]
    arguments = options.parsed_arguments()
    if options.inner is not None and not entry.inner:
        raise OptionError(f"kvpress-{name} wraps no other press", hint="leave inner out")
    kind = getattr(library, entry.class_name)
    wrapped = []
    for part in filter(None, (options.inner or entry.inner).split("+")):
        inner = getattr(library, part, None)
        if inner is None or not issubclass(inner, library.ScorerPress):
            raise OptionError(f"inner: {part!r} is no scorer of kvpress", hint="such as KnormPress")
        wrapped.append(inner)
    if len(wrapped) > 1 and entry.budget != "stages":
        raise OptionError(f"kvpress-{name} wraps one press", hint="kvpress-composed takes several")
    try:
        if entry.budget == "stages":
            return kind([inner() for inner in wrapped], **arguments)
        if entry.budget == "layers":
            ratios = _numbers(arguments.pop("compression_ratios", ()))
            return kind(wrapped[0](), ratios, **arguments)
        if entry.class_name == "FinchPress":
            # Its own context manager takes the window from a delimiter in the prompt; turned keys would be no rows of ours.
            window = int(arguments.pop("window_size", 64))
            press = kind(rerotate_keys=False, **arguments)
            press.window_size = window
            return press
        return kind(*(inner() for inner in wrapped), **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise OptionError(f"kvpress-{name} does not take these arguments", cause=str(error)) from error


def parts(press: Any) -> list[Any]:
    """The presses that ``press`` wraps, if any, then the press itself."""
    inner = getattr(press, "press", None)
    return [*getattr(press, "presses", ()), *([] if inner is None else [inner]), press]


def shortest(press: Any) -> int:
    """Fewest tokens that ``press`` and those that it wraps accept; at least 1."""
    found = [1]
    for part in parts(press):
        for kind in type(part).__mro__:
            attributes, more = SHORTEST.get(kind.__name__, ((), 1))
            found.append(sum(getattr(part, attribute) for attribute in attributes) + more)
    return max(found)


def set_budget(press: Any, kind: str, kept: int, tokens: int, layers: int) -> None:
    """Have ``press`` keep ``kept`` of ``tokens`` tokens per KV head, in a model of ``layers`` layers.

    A threshold, and ratios by layer that are given as arguments, are left to the press.
    """
    if kind == "ratio":
        for part in parts(press):  # some scorers read it even when another press spends it
            part.compression_ratio = _ratio(kept, tokens)
    elif kind == "layers" and not press.compression_ratios:
        press.compression_ratios = [_ratio(kept, tokens)] * layers
    elif kind == "stages":
        left = tokens
        for number, part in enumerate(press.presses, 1):  # the same share in every stage
            after = (
                kept
                if number == len(press.presses)
                else max(kept, round(tokens * (kept / tokens) ** (number / len(press.presses))))
            )
            part.compression_ratio = _ratio(after, left)
            left = after


def _ratio(kept: int, tokens: int) -> float:
    """Half a token beyond the count: kvpress rounds down, and must not round below it."""
    return 1 - (kept + 0.5) / tokens if kept < tokens else 0.0


def _numbers(value: Any) -> list[float]:
    """``0.2:0.5`` as numbers; commas separate arguments."""
    if isinstance(value, str):
        value = value.split(":")
    return [float(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
