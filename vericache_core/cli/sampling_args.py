"""The sampling arguments of a command that generates; parsed by SamplingParams, so every error reads alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vericache_core.runtime.sampling_params import SamplingParams

_ARGUMENTS = {
    "max_new_tokens": "most tokens to generate [128]",
    "min_new_tokens": "no end before so many tokens [0]",
    "temperature": "0 takes the likeliest token [0]",
    "top_k": "sample among the K likeliest [off]",
    "top_p": "sample among the likeliest that hold this mass [off]",
    "min_p": "drop tokens below this share of the likeliest [off]",
    "seed": "of sampling [0]",
    "repetition_penalty": "over prompt and answer, 1 is off [1]",
    "presence_penalty": "over the answer [0]",
    "frequency_penalty": "over the answer [0]",
    "no_repeat_ngram": "forbid repeating N-grams [0]",
    "logprobs": "report so many log probabilities per token [off]",
}
SAMPLING: Final = (*_ARGUMENTS, "stop", "ignore_eos")
"""Names of all of them in parsed arguments."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per sampling parameter that fits on a command line."""
    group = parser.add_argument_group("sampling")
    for name, text in _ARGUMENTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="X", help=text)
    group.add_argument("--stop", metavar="TEXT", action="append", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not end at the end-of-sequence token")


def params_from_args(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of a parsed command line; ConfigError for bad values."""
    from vericache_core.runtime.sampling_params import SamplingParams

    given: dict[str, Any] = {name: getattr(args, name) for name in SAMPLING}
    return SamplingParams.from_mapping({name: value for name, value in given.items() if value is not None}, text=True)
