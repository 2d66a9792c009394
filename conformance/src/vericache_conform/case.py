"""What a check is given: the compressor, the size of the job, and ways to try inputs so that failures can be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from vericache_conform.outcome import Example, Failure, Skip
from vericache_conform.subject import Subject
from vericache_conform.world import World, layout
from vericache_core.blame import raised_at
from vericache_core.chain import ChainCompressor
from vericache_core.compressor import Compressor
from vericache_core.context import CompressContext
from vericache_core.errors import VeriCacheError
from vericache_core.kv import CompressedKV, LayerDescriptor

T = TypeVar("T")
PREFERRED_DIMS = (32, 64, 128, 16, 96, 80, 256)
EXAMPLES = {"static": 10, "contract": 20, "runtime": 10, "model": 4, "perf": 1}
"""Examples that hypothesis draws per property and tier: the fixed profiles."""


def attempt(what: str, action: Callable[[], T]) -> T:
    """Run code of the compressor; whatever it raises is a failure of the compressor, not of the suite."""
    try:
        return action()
    except (Failure, Skip):
        raise
    except (Exception, SystemExit) as error:
        where = raised_at(error)
        facts = {"raised": f"{type(error).__name__}{where}"} if where else {}
        raise Failure(f"{what} raised {type(error).__name__}: {error}{where}", facts=facts) from error


def named_values(options: Any) -> dict[str, Any]:
    """Fields of an options dataclass and their values; nothing for a compressor without options."""
    if not dataclasses.is_dataclass(options):
        return {}
    return {field_.name: getattr(options, field_.name) for field_ in dataclasses.fields(options)}


@dataclass
class Case:
    """One check on one compressor.

    Attributes:
        subject: the compressor.
        seed: of everything that is drawn.
        tier: of the check, for the number of examples.
        only: the example to replay; nothing else is tried then.
        model: the real model of the model tier.
        declared: what the author declares in ``conformance.toml`` beyond expected failures.
        timeout_factor: multiplies every limit of time.
        facts: measurements for the report.
    """

    subject: Subject
    seed: int = 0
    tier: str = "contract"
    only: Example | None = None
    model: str = "demo"
    declared: Mapping[str, Any] = field(default_factory=dict)
    timeout_factor: float = 1.0
    facts: dict[str, Any] = field(default_factory=dict)

    # -- trying inputs ---------------------------------------------------------------------------

    def for_each(self, examples: Iterable[Example], body: Callable[[Any], None]) -> int:
        """Try each example; the first failure carries it. Returns how many were tried."""
        tried = 0
        for example in [self.only] if self.only is not None else examples:
            self._run(example, body)
            tried += 1
        return tried

    def for_all(self, strategy: SearchStrategy[Any], body: Callable[[Any], None], most: int | None = None) -> int:
        """Try examples that hypothesis draws, derandomised; a failure is shrunk and carries the smallest example."""
        if self.only is not None:
            return self.for_each([], body)
        tried: list[Example] = []

        @seed(self.seed)
        @settings(
            max_examples=most or EXAMPLES[self.tier],
            derandomize=self.seed == 0,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(strategy)
        def property_(example: Example) -> None:
            tried.append(example)
            self._run(example, body)

        property_()
        return len(tried)

    def _run(self, example: Example, body: Callable[[Any], None]) -> None:
        try:
            body(example)
        except Failure as failure:
            if failure.example is None:
                failure.example = example
            raise

    # -- the compressor ----------------------------------------------------------------------------

    def create(self, options: Mapping[str, Any] | None = None) -> Compressor:
        return attempt("building the compressor", lambda: self.subject.create(options))

    @property
    def option_sets(self) -> list[dict[str, Any]]:
        """Option sets under test: the defaults and those the plugin names."""
        return self._memo("option_sets", self.subject.option_sets)

    @staticmethod
    def promises(compressor: Compressor) -> Any:
        """The options that say which tokens are kept; in a composition those of the part that drops tokens."""
        return getattr(compressor.dropper if isinstance(compressor, ChainCompressor) else compressor, "options", None)

    def refusal(self, compressor: Compressor, layers: Sequence[LayerDescriptor]) -> str | None:
        """Why the compressor refuses these layers by name, or None when it takes them."""
        check = getattr(compressor, "check_layers", None)
        try:
            if callable(check):
                check(layers)
        except VeriCacheError as error:
            return str(error)
        except Exception as error:
            raise Failure(f"check_layers raised {type(error).__name__}: {error}; it may only raise an OptionError") from error
        return None

    def layers(self, options: Mapping[str, Any] | None = None, **shape: Any) -> tuple[LayerDescriptor, ...]:
        """A layout that the compressor takes with these options: the first head_dim that is not refused."""
        reasons = []
        dims = (shape.pop("head_dim"),) if "head_dim" in shape else PREFERRED_DIMS
        for head_dim in dims:
            made = layout(head_dim=head_dim, **shape)
            compressor = self.create(options)
            reason = self.refusal(compressor, made)
            if reason is None and any(attempt("supports", partial(_supported, compressor, made))):
                return made
            reasons.append(f"head_dim {head_dim}: {reason or 'declined'}")
        raise Failure(f"every layout is refused; the first: {reasons[0]}")

    @property
    def landmarks(self) -> list[int]:
        """Numbers of tokens that options name (windows, residuals, groups): where boundaries are."""
        return self._memo("landmarks", self._landmarks)

    def _landmarks(self) -> list[int]:
        found = set()
        for options in self.option_sets:
            compressor = self.create(options)
            for part in (
                (compressor.dropper, compressor.quantizer) if isinstance(compressor, ChainCompressor) else (compressor,)
            ):
                for value in named_values(getattr(part, "options", None)).values():
                    if isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 512:
                        found.add(value)
        return sorted(found)

    @property
    def length(self) -> int:
        """A prefix length beyond every boundary that the default options name, and no round number."""
        return min(700, max([60, *self.landmarks[-1:]]) * 2 + 45)

    def compress(
        self, compressor: Compressor, world: World, tokens: int, protected: Sequence[tuple[int, int]] = ()
    ) -> CompressedKV:
        context = world.context(compressor.needs, tokens, protected=protected)
        return attempt(f"compress of {tokens} tokens", lambda: compressor.compress(world.view(0, tokens), context))

    def extend(
        self, compressor: Compressor, held: CompressedKV, world: World, stop: int, start: int | None = None
    ) -> CompressedKV:
        """Extend up to ``stop``; ``start`` is where the caller knows that ``held`` ends, if it may be wrong about that."""
        rows = world.view(held.tokens if start is None else start, stop)
        return attempt(f"extend by {rows.tokens} tokens", lambda: compressor.extend(held, rows, CompressContext()))

    def rollback(self, compressor: Compressor, held: CompressedKV, tokens: int, world: World | None) -> CompressedKV:
        prefix = None if world is None else world.view(0, held.tokens - tokens)
        return attempt(f"rollback of {tokens} tokens", lambda: compressor.rollback(held, tokens, prefix))

    def note(self, name: str, value: Any) -> None:
        """Put a measured number into the report."""
        self.facts[name] = value

    def _memo(self, key: str, make: Callable[[], T]) -> T:
        if key not in self.subject.memo:
            self.subject.memo[key] = make()
        value: T = self.subject.memo[key]
        return value


def _supported(compressor: Compressor, layers: Sequence[LayerDescriptor]) -> list[bool]:
    return [bool(compressor.supports(layer)) for layer in layers]
