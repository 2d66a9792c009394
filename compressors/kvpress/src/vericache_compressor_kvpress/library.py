"""kvpress, imported without letting it change transformers."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from vericache_compressor_kvpress.options import KvpressOptions
from vericache_compressor_kvpress.table import PRESSES, SHORTEST
from vericache_core.errors import MissingDependencyError, OptionError


def kvpress() -> Any:
    """The module.

    Importing it wraps every attention function that transformers knows, for masks that VeriCache has no use for;
    the functions are put back.

    Raises:
        MissingDependencyError: it is not installed or cannot be imported here.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
    """The press that ``kvpress-<name>`` stands for, without a ratio.

    Raises:
        OptionError: an argument or inner press that it does not take.
    """
    library, entry = kvpress(), PRESSES[name]
    arguments = options.parsed_arguments()
    if options.inner is not None and not entry.inner:
        raise OptionError(f"kvpress-{name} wraps no other press", hint="leave inner out")
    try:
        if entry.inner:
            inner = getattr(library, options.inner or entry.inner, None)
            if inner is None or not issubclass(inner, library.ScorerPress):
                raise OptionError(f"inner: {options.inner!r} is no scorer of kvpress", hint="such as KnormPress")
            return getattr(library, entry.class_name)(inner(), **arguments)
        return getattr(library, entry.class_name)(**arguments)
    except (TypeError, AssertionError) as error:
        raise OptionError(f"kvpress-{name} does not take these arguments", cause=str(error)) from error


def shortest(press: Any) -> int:
    """Fewest tokens that ``press`` and the one that it wraps accept; at least 1."""
    found = [1]
    for part in (press, getattr(press, "press", None)):
        for kind in type(part).__mro__:
            attributes, more = SHORTEST.get(kind.__name__, ((), 1))
            found.append(sum(getattr(part, attribute) for attribute in attributes) + more)
    return max(found)
