"""``vericache generate``: write with a compressed KV cache, and prove that nothing changed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_core.cli.engine_args import add_engine_arguments, registry_from_args, resolve_from_args, tell_what_is_idle
from vericache_core.cli.output import note, print_json
from vericache_core.cli.sampling_args import add_sampling_arguments, params_from_args
from vericache_core.errors import PromptError, UsageError

if TYPE_CHECKING:
    from vericache_core.cli.compare import Comparison
    from vericache_core.engine import Engine
    from vericache_core.outputs import RequestOutput
    from vericache_core.runtime.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the prompt, what to print, and the engine's and sampling arguments."""
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument("-f", "--file", action="append", metavar="FILE", help="text put before the prompt (repeatable)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--compare-full", action="store_true", help="decode again with the full KV and compare every bit")
    parser.add_argument("--stats", action="store_true", help="print acceptance, bytes and times (implied by --compare-full)")
    parser.add_argument("--stream", action="store_true", help="print text as soon as it is certain")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; exit 1 when ``--compare-full`` finds a difference."""
    if args.stream and args.json:
        raise UsageError("--stream and --json exclude each other")
    resolved = resolve_from_args(args)
    config = resolved.config
    registry = registry_from_args(args, config)
    if config.compressor is not None:
        registry.create(config.compressor, config.compressor_options())  # a wrong name must not wait for the model
    text = _text(args)
    params = params_from_args(args)
    tell_what_is_idle(resolved, fixed=True)

    from vericache_core.engine import Engine

    started = time.perf_counter()
    with Engine.from_pretrained(args.model, config) as engine:
        if args.stats or args.compare_full:
            probe = engine.admission.probe
            checked = "off" if probe is None else f"{probe.logits_rows} rows, {len(probe.failures)} differ"
            note(f"{args.model} ready in {time.perf_counter() - started:.1f} s; {engine.attention} attention; probe {checked}")
        prompt = _prompt(args, text, engine.tokenizer)
        output = _stream(engine, prompt, params) if args.stream else _generate(engine, prompt, params, args.compare_full)
        comparison = _compare(engine, prompt, params, output) if args.compare_full else None
    return _report(args, output, comparison)


def _text(args: argparse.Namespace) -> str:
    parts = []
    for name in args.file or []:
        try:
            parts.append(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise PromptError(f"cannot read {name}", cause=error.strerror) from None
        except UnicodeDecodeError as error:
            raise PromptError(f"{name} is not UTF-8 text", cause=f"byte {error.start}") from None
    if args.prompt == "-" or (args.prompt is None and not parts):
        if args.prompt is None and sys.stdin.isatty():
            raise PromptError("no prompt", hint="give one, or -f FILE, or pipe text in")
        parts.append(sys.stdin.read())
    elif args.prompt is not None:
        parts.append(args.prompt)
    text = "\n\n".join(part.strip("\n") for part in parts)
    if not text.strip():
        raise PromptError("the prompt is empty", hint="give a prompt, or -f FILE")
    return text


def _prompt(args: argparse.Namespace, text: str, tokenizer: Any) -> Any:
    """Chat messages where the model has a chat template, else plain text."""
    if args.raw or not getattr(tokenizer, "chat_template", None):
        if args.system is not None:
            raise UsageError("--system needs a model with a chat template", hint="put it into the prompt")
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _generate(engine: Engine, prompt: Any, params: SamplingParams, record: bool) -> RequestOutput:
    from vericache_core.cli.progress import bar

    with bar("generate") as progress:
        (output,) = engine.generate([prompt], params, record_logits=record, progress=progress)
    if output.error is not None:
        raise output.error
    return output


def _stream(engine: Engine, prompt: Any, params: SamplingParams) -> RequestOutput:
    output = None
    for chunk in engine.stream(prompt, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        output = chunk.output
    sys.stdout.write("\n")
    if output is None:
        raise AssertionError("a stream that did not fail ends with the whole output")
    return output


def _compare(engine: Engine, prompt: Any, params: SamplingParams, output: RequestOutput) -> Comparison:
    from vericache_core.cli.compare import compare_bitwise, compare_with_transformers
    from vericache_core.cli.progress import bar

    with bar("full KV") as progress:
        (plain,) = engine.generate([prompt], params, compressor=None, record_logits=True, progress=progress)
    if plain.error is not None:
        raise plain.error
    if engine.config.identity == "token":
        return compare_with_transformers(engine, output, plain)
    return compare_bitwise(output, plain)


def _report(args: argparse.Namespace, output: RequestOutput, comparison: Comparison | None) -> int:
    from vericache_core.cli.compare import metrics_lines, to_json

    if args.json:
        print_json("vericache.generate/1", to_json(output, comparison))
    else:
        if not args.stream:
            print(output.text)
        if args.stats or args.compare_full:
            for line in metrics_lines(output, comparison):
                print(line, file=sys.stderr if comparison is None else sys.stdout)
    return 0 if comparison is None or comparison.identical else 1
