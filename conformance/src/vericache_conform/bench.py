"""The runtime with the compressor under test, on tiny models: what the checks of the runtime tier drive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vericache_conform import models
from vericache_conform.case import Case
from vericache_conform.outcome import Failure, Skip
from vericache_core.compressor import Compressor
from vericache_core.config import EngineConfig
from vericache_core.errors import UnsupportedModelError, VeriCacheError
from vericache_core.kv import CompressedKV
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.spec import CompressorSpec
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:  # it imports transformers, which takes seconds that the static and contract tiers can do without
    from vericache_core.engine import Engine
    from vericache_core.outputs import RequestOutput

ROWS = 16


Script = Callable[[Request, int], int]
"""``(request, index of the drafted token among the generated ones) -> token`` that is proposed instead."""


@dataclass
class Seen:
    """What a spied run showed.

    Attributes:
        compressed: what ``compress`` returned, call by call.
        draft_logits: per drafted token the logits it was chosen from.
        draft_tokens: the drafted tokens.
        draft_positions: logical position of the row behind each.
        rounds: what was drafted, by prompt and by how many tokens were generated before.
    """

    compressed: list[CompressedKV] = field(default_factory=list)
    draft_logits: list[Tensor] = field(default_factory=list)
    draft_tokens: list[int] = field(default_factory=list)
    draft_positions: list[int] = field(default_factory=list)
    rounds: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)


class Bench:
    """Engines over one tiny model; references are computed once.

    Args:
        case: the check's.
        architecture: a name of :data:`vericache_conform.models.ARCHITECTURES`, or ``near-tie``.
    """

    def __init__(self, case: Case, architecture: str = models.LLAMA) -> None:
        self.case, self.architecture = case, architecture
        self.head_dim = case.layers()[0].head_dim
        key = f"model/{architecture}/{self.head_dim}/{case.seed}"
        memo = case.subject.memo
        if key not in memo:
            memo[key] = models.build(architecture, self.head_dim, case.seed)
        self.model = memo[key]
        self.vocab = int(self.model.get_output_embeddings().weight.shape[0])
        self.tokenizer = models.ToyTokenizer(self.vocab)

    def twin(self) -> Any:
        """A second model with the same weights, for loops that set their own attention."""
        return models.build(self.architecture, self.head_dim, self.case.seed)

    def prompt(self, tokens: int, number: int = 0) -> list[int]:
        """Random ids, another prompt for every number."""
        return models.prompt(tokens, self.case.seed * 100 + number, self.vocab)

    @property
    def long(self) -> int:
        """A prompt length at which the defaults really compress."""
        return min(self.case.length, 420)

    def engine(self, options: Mapping[str, Any] | None = None, seen: Seen | None = None, **config: Any) -> Engine:
        """An engine with the compressor under test; with ``seen`` it is spied on.

        Raises:
            Failure: the engine refuses the compressor.
            Skip: the engine refuses the model, as it may on some releases.
        """
        from vericache_core.engine import Engine

        subject = self.case.subject
        registry = subject.registry if seen is None else _Recording(subject.registry, seen)
        settings: dict[str, Any] = {"rows": ROWS, "window": 4, "fold": 0, "full_kv": "host", "probe": False, **config}
        try:
            made = EngineConfig(compressor=subject.name, options={**subject.options, **(options or {})}, **settings)
            return Engine(self.model, self.tokenizer, made, registry)
        except UnsupportedModelError as error:
            if self.architecture in models.MAY_BE_REFUSED:
                raise Skip(f"{self.architecture} is refused here: {error}", declared=True) from error
            raise
        except VeriCacheError as error:
            raise Failure(f"the engine refuses the compressor on {self.architecture}: {error}") from error

    def plain(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        """What the full cache alone gives, with logits; computed once per prompt and parameters."""
        from vericache_core.engine import Engine

        key = f"plain/{self.architecture}/{self.head_dim}/{self.case.seed}/{tuple(prompt)!r}/{params!r}"
        memo = self.case.subject.memo
        if key not in memo:
            with Engine(self.model, self.tokenizer, EngineConfig(rows=ROWS, probe=False)) as engine:
                memo[key] = engine.generate([list(prompt)], params, compressor=None, record_logits=True)[0]
        found: RequestOutput = memo[key]
        return found

    def run(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        """One request with the compressor under test, with logits."""
        return engine.generate([list(prompt)], params, record_logits=True)[0]

    def script(self, plain: RequestOutput, wrong: Callable[[int], bool]) -> Script:
        """Propose the full cache's own tokens, and another one wherever ``wrong(index)``."""

        def propose(_request: Request, index: int) -> int:
            token = plain.token_ids[index] if index < len(plain.token_ids) else 0
            return (token + 1) % self.vocab if wrong(index) else token

        return propose


def greedy(count: int, **more: Any) -> SamplingParams:
    """Parameters of a greedy request of ``count`` tokens."""
    return SamplingParams(max_new_tokens=count, **more)


class _Recording(Registry):
    """A registry whose compressors note what their ``compress`` returns."""

    def __init__(self, inner: Registry, seen: Seen) -> None:
        super().__init__(discover=False)
        self._inner, self._seen = inner, seen

    def spec(self, name: str) -> CompressorSpec:
        return self._inner.spec(name)

    def without(self, disable: Iterable[str]) -> Registry:
        return self

    def create(self, name: str, options: Any = None) -> Compressor:
        built: Any = self._inner.create(name, options)
        original = built.compress

        def compress(*arguments: Any) -> CompressedKV:
            made: CompressedKV = original(*arguments)
            self._seen.compressed.append(made)
            return made

        built.compress = compress
        found: Compressor = built
        return found


@contextmanager
def spied(seen: Seen | None = None, script: Script | None = None) -> Iterator[None]:
    """Watch every draft step, and propose what ``script`` says instead of what the compressed cache says."""
    original = Request.take_draft

    def take_draft(request: Request, logits: Tensor) -> None:
        position = -1 if request.draft is None else request.draft.tokens
        original(request, logits)
        if script is not None:
            request.drafts[-1] = script(request, len(request.generated) + len(request.drafts) - 1)
        if seen is not None:
            seen.draft_positions.append(position)
            seen.draft_logits.append(logits.detach().float().clone())
            seen.draft_tokens.append(request.drafts[-1])
            prompt = tuple(request.tokens[: request.prompt_tokens])
            seen.rounds.setdefault((prompt, len(request.generated)), []).append(request.drafts[-1])

    Request.take_draft = take_draft  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Request.take_draft = original  # type: ignore[method-assign]
