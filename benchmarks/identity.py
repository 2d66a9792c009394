"""Does compressed drafting change a single bit? Runs a grid of cells against plain full-KV decoding.

``python benchmarks/identity.py`` runs the full product of compressor settings, windows, batches, dtypes and
tiers on two random-weight models, one of them the NEAR_TIE model on which a verifier that runs one plain
forward is wrong (shown first), and then a pairwise-covering set of cells on the demo model. A cell compares
tokens, every logits row and every KV row with the same engine's plain decode. Exit status 1 if a bit differs.

``--tiny`` and ``--demo`` run one half; ``--json FILE`` keeps every cell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from pairwise import pairwise

from vericache_core import Engine, EngineConfig, RequestOutput, SamplingParams
from vericache_core.config import replace
from vericache_core.model.load import load_model

WINDOWS = (1, 4, 16, 31)
TIERS = ("device", "host", "disk")
DTYPES = (torch.float32, torch.bfloat16)
BATCHES = (1, 5)
KEEPS = (0.5, 0.25, 0.1)
PROMPTS = {
    "code": "Continue this Python module.\n\n" + "def area(width, height):\n    return width * height\n\n\n" * 12,
    "prose": "Summarise the following text.\n\n"
    + "The river rose in the night, and by morning the lower fields lay under water. The farmers moved their "
    "cattle to the hill and waited. On the third day the rain stopped, the mill wheel turned again, and the "
    "children found fish in the furrows. " * 4,
    "chat": "You are a helpful assistant. Tell me, step by step, how to plan a vegetable garden for a family of four, "
    "what to sow first, how far apart, and what to do about slugs without poison. " * 3,
    "repetition": "Repeat this list exactly.\n" + "red, green, blue, yellow, black, white, orange, violet; " * 20,
}


@dataclass
class Tally:
    """Sums over cells."""

    cells: int = 0
    tokens: int = 0
    token_differences: int = 0
    logit_bits: int = 0
    kv_differences: int = 0
    problems: list[str] = field(default_factory=list)
    acceptance: dict[str, list[int]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def settings(tiny: bool) -> list[tuple[str, float | int | None, dict[str, Any]]]:
    """``(compressor, keep or bits, options)`` of the grid; tiny models have head_dim 16 and short prompts."""
    snapkv = {"window": 8} if tiny else {}
    kivi = {"group": 16, "residual": 32} if tiny else {}
    grid: list[tuple[str, float | int | None, dict[str, Any]]] = []
    grid += [("snapkv", keep, {**snapkv, "keep": keep}) for keep in KEEPS]
    grid += [("random", keep, {"keep": keep}) for keep in KEEPS]
    grid += [("kivi", bits, {**kivi, "bits": bits}) for bits in (4, 2)]
    return [*grid, ("identity", None, {}), ("adversarial", None, {})]


@contextmanager
def kv_digests(engine: Engine) -> Iterator[dict[int, str]]:
    """Digest of the full KV of each request, taken just before the engine lets it go."""
    digests: dict[int, str] = {}
    let_go = engine.loop.remove

    def remove(request: Any) -> None:
        if request.number not in digests and request.full.tokens:
            digest = hashlib.sha256()
            for layer in engine.adapter.layers:
                for rows in request.full.read(layer.index, 0, request.full.tokens):
                    digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
            digests[request.number] = digest.hexdigest()
        let_go(request)

    engine.loop.remove = remove  # type: ignore[method-assign]  # white-box: bits of the cache are no public output
    try:
        yield digests
    finally:
        engine.loop.remove = let_go  # type: ignore[method-assign]


def run_engine(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams, compressor: str | None
) -> tuple[list[RequestOutput], list[str]]:
    """Outputs with logits, and KV digests, in the order of the prompts."""
    with kv_digests(engine) as digests:
        outputs = engine.generate(prompts, params, compressor=compressor, record_logits=True)
    return outputs, [digests[number] for number in sorted(digests)]


def bits_that_differ(left: torch.Tensor, right: torch.Tensor) -> int:
    """Number of differing bits between two tensors of one shape."""
    kind = torch.int32 if left.dtype == torch.float32 else torch.int16
    mixed = left.contiguous().view(kind) ^ right.contiguous().view(kind)
    count = 0
    while bool(mixed.any()):
        count += int((mixed & 1).sum())
        mixed = (mixed >> 1) & (0x7FFFFFFF if kind == torch.int32 else 0x7FFF)
    return count


def compare(tally: Tally, label: dict[str, Any], got: Any, plain: Any) -> None:
    """Count differences of one cell and remember what is wrong."""
    tally.cells += 1
    drafted = accepted = differing = bits = kv = 0
    for mine, theirs, my_kv, their_kv in zip(got[0], plain[0], got[1], plain[1], strict=True):
        if mine.error is not None:
            tally.problems.append(f"{label}: {mine.error}")
        if mine.metrics.degraded:
            tally.problems.append(f"{label}: {mine.metrics.degraded}")
        pairs = list(zip(mine.token_ids, theirs.token_ids, strict=False))
        differing += sum(a != b for a, b in pairs) + abs(len(mine.token_ids) - len(theirs.token_ids))
        shared = min(len(mine.logits), len(theirs.logits))
        bits += bits_that_differ(mine.logits[:shared], theirs.logits[:shared])
        kv += my_kv != their_kv
        tally.tokens += len(theirs.token_ids)
        drafted += mine.metrics.drafted
        accepted += mine.metrics.accepted
    tally.token_differences += differing
    tally.logit_bits += bits
    tally.kv_differences += kv
    if differing or bits or kv:
        tally.problems.append(f"{label}: {differing} tokens, {bits} logit bits, {kv} caches differ")
    if label["compressor"] == "identity" and accepted != drafted:
        tally.problems.append(f"{label}: the identity compressor had {accepted} of {drafted} accepted")
    name = label["compressor"] + ("" if label["knob"] is None else f" {label['knob']}")
    total = tally.acceptance.setdefault(name, [0, 0])
    total[0] += accepted
    total[1] += drafted
    tally.records.append(
        {**label, "drafted": drafted, "accepted": accepted, "tokens_differ": differing, "logit_bits": bits, "kv": kv}
    )


# -- random-weight models ----------------------------------------------------------------------------


def tiny_model(near_tie: bool) -> Any:
    """TINY_LLAMA, or NEAR_TIE: an output head whose rows come in nearly equal pairs."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if not near_tie:
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, **ends,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False, **ends,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        head = model.lm_head.weight
        head.mul_(20)
        head[1::2] = head[0::2] + 1e-7 * torch.randn_like(head[0::2])
    return model


@torch.no_grad()
def one_forward_verifier(model: Any, width: int = 4, tokens: int = 132) -> tuple[int, int]:
    """Flips of a verifier that runs ``width`` rows in one plain SDPA forward, on drafts that are all right."""
    model.set_attn_implementation("sdpa")
    prompt = torch.randint(0, model.config.vocab_size, (1, 57), generator=torch.Generator().manual_seed(5))
    one = model(prompt, use_cache=True)
    cache, expected = one.past_key_values, [int(one.logits[0, -1].argmax())]
    for _ in range(tokens):
        expected.append(int(model(torch.tensor([expected[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1].argmax()))
    cache = model(prompt, use_cache=True).past_key_values
    flips = 0
    for start in range(0, tokens, width):
        block = torch.tensor([expected[start : start + width]])
        rows = model(block, past_key_values=cache, use_cache=True).logits[0]
        flips += sum(int(row.argmax()) != expected[start + 1 + i] for i, row in enumerate(rows))
    return flips, tokens


def run_tiny(tally: Tally) -> None:
    """The full product on the random-weight models."""
    flips, total = one_forward_verifier(tiny_model(True))
    print(f"NEAR_TIE, plain one-forward verifier (4 rows, SDPA, fp32): {flips} of {total} tokens flip")
    if not flips:
        tally.problems.append("the NEAR_TIE model does not catch a plain one-forward verifier: the grid has no teeth")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for near_tie in (False, True):
        for dtype in DTYPES:
            model = tiny_model(near_tie).to(dtype)
            vocab = model.config.vocab_size
            draw = torch.Generator().manual_seed(11)
            ragged = [torch.randint(0, vocab, (n,), generator=draw).tolist() for n in (131, 37, 90, 53, 160)]
            config = EngineConfig(rows=32, attention="auto")
            base = Engine(model, None, config)
            for batch in BATCHES:
                plain = run_engine(base, ragged[:batch], params, None)
                for tier in TIERS:
                    for window in WINDOWS:
                        for name, knob, options in settings(tiny=True):
                            changes = {
                                "compressor": name,
                                "options": options,
                                "window": window,
                                "full_kv": tier,
                                "probe": False,
                            }
                            with Engine(model, None, replace(config, **changes)) as engine:
                                got = run_engine(engine, ragged[:batch], params, name)
                            label = {
                                "model": "near_tie" if near_tie else "tiny_llama", "dtype": str(dtype)[6:], "batch": batch,
                                "tier": tier, "window": window, "compressor": name, "knob": knob,
                            }  # fmt: skip
                            compare(tally, label, got, plain)
            base.close()
            where = f"{'NEAR_TIE' if near_tie else 'TINY_LLAMA'} {str(dtype)[6:]}"
            print(f"{where}: {tally.cells} cells, {len(tally.problems)} problems", flush=True)


# -- demo model --------------------------------------------------------------------------------------


def demo_prompts(tokenizer: Any, kind: str, batch: int) -> list[list[int]]:
    """The prompt of a kind as a chat, and with a batch ragged cuts of the other kinds beside it."""

    def ids(text: str) -> list[int]:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        encoded: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
        return encoded

    first = ids(PROMPTS[kind])
    others = [ids(text) for text in PROMPTS.values()]
    cuts = [others[0][:97], others[1][:61], others[2][:33], others[3][:150]]
    return [first, *cuts][:batch]


def run_demo(tally: Tally, new_tokens: int, dtypes: Sequence[torch.dtype]) -> None:
    """A pairwise-covering set of cells on the demo model, those of ``dtypes``."""
    factors: dict[str, Any] = {"setting": settings(tiny=False), "window": WINDOWS, "batch": BATCHES}
    factors |= {"dtype": DTYPES, "tier": TIERS, "prompt": list(PROMPTS)}
    cells = pairwise(factors, at_least=40)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    for dtype in dtypes:
        model, tokenizer = load_model("demo", dtype)
        config = EngineConfig()
        base = Engine(model, tokenizer, config)
        plains: dict[tuple[str, int], Any] = {}
        for cell in (cell for cell in cells if cell["dtype"] == dtype):
            started = time.perf_counter()
            kind, batch = cell["prompt"], cell["batch"]
            prompts = demo_prompts(tokenizer, kind, batch)
            if (kind, batch) not in plains:
                plains[kind, batch] = run_engine(base, prompts, params, None)
                against_transformers(tally, model, prompts, plains[kind, batch][0])
            name, knob, options = cell["setting"]
            changes = {
                "compressor": name,
                "options": options,
                "window": cell["window"],
                "full_kv": cell["tier"],
                "probe": False,
            }
            with Engine(model, tokenizer, replace(config, **changes)) as engine:
                got = run_engine(engine, prompts, params, name)
            label = {
                "model": "demo", "dtype": str(dtype)[6:], "batch": batch, "tier": cell["tier"], "window": cell["window"],
                "compressor": name, "knob": knob, "prompt": kind,
            }  # fmt: skip
            compare(tally, label, got, plains[kind, batch])
            last = tally.records[-1]
            print(
                f"demo {label['dtype']} {kind} batch {batch} {label['tier']} window {label['window']} {name} {knob}: "
                f"{last['accepted']}/{last['drafted']} accepted, {last['tokens_differ']} tokens and {last['logit_bits']} logit "
                f"bits differ ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )  # fmt: skip
        base.close()


def against_transformers(tally: Tally, model: Any, prompts: Sequence[list[int]], plain: Sequence[RequestOutput]) -> None:
    """Plain tokens against ``generate(do_sample=False)``, which shares no attention, cache or loop with the engine.

    In float32 a difference is a problem; in bfloat16 one is reported with its top-2 margin.
    """
    for ids, output in zip(prompts, plain, strict=True):
        given = torch.tensor([ids])
        count = len(output.token_ids)
        fixed: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": -1}
        theirs = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **fixed)[0, len(ids) :].tolist()
        equal = next((i for i, (a, b) in enumerate(zip(theirs, output.token_ids, strict=True)) if a != b), count)
        text = (
            f"demo {str(model.dtype)[6:]} against transformers generate, {len(ids)} prompt tokens: {equal}/{count} tokens equal"
        )
        if equal < count and output.logits is not None:
            best, second = output.logits[equal].float().sort(descending=True).values[:2].tolist()
            text += f", first divergence at {equal} with top-2 margin {best - second:.3g} of {best:.3g}"
            if model.dtype == torch.float32:
                tally.problems.append(text)
        print(text, flush=True)


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="only the random-weight models")
    parser.add_argument("--demo", action="store_true", help="only the demo model")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens per request on the demo model [24]")
    parser.add_argument("--dtype", choices=[str(d)[6:] for d in DTYPES], help="only the demo cells of this dtype")
    parser.add_argument("--json", metavar="FILE", help="write every cell")
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    started, tally = time.perf_counter(), Tally()
    if not args.demo:
        run_tiny(tally)
    if not args.tiny:
        run_demo(tally, args.new_tokens, [d for d in DTYPES if args.dtype in (None, str(d)[6:])])
    for name, (accepted, drafted) in sorted(tally.acceptance.items()):
        print(f"acceptance {name:16} {accepted:7}/{drafted:<7} {accepted / max(1, drafted):6.1%}")
    print(
        f"{tally.cells} cells, {tally.tokens} tokens: {tally.token_differences} differing tokens, {tally.logit_bits} differing "
        f"logit bits, {tally.kv_differences} differing KV caches ({time.perf_counter() - started:.0f} s)"
    )
    for problem in tally.problems:
        print(f"PROBLEM {problem}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:  # noqa: PTH123 (a script's own argument)
            json.dump({"cells": tally.records, "problems": tally.problems}, file, indent=1)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
