"""In a fresh process: what importing, building and using a compressor does to everything around it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "ftplib.connect")
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile")
FILES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


def look(order: Mapping[str, Any]) -> dict[str, Any]:
    """Facts for the checks S-01 to S-07; see there what each is for.

    Importing transformers takes most of the time, and what a plugin does not import it cannot change: it is imported
    beforehand only if ``with_transformers`` asks for it. Otherwise ``imports_transformers`` says when that is needed.
    """
    from vericache_core.plugins.registry import Registry

    listed = [info.name for info in Registry.from_env().list_plugins()]
    by_listing: list[str] = sorted(name for name in ("torch", "transformers", "pluggy") if name in sys.modules)
    names = order["ref"].split("+")
    by_listing += [root for root in map(_plugin_root, names) if root and root in sys.modules]

    import torch

    if order["with_transformers"]:
        import transformers.masking_utils  # so that patches to it show
        import transformers.modeling_utils  # noqa: F401

    import vericache_core.compressor  # noqa: F401

    torch.set_num_threads(order["threads"])
    watch = _Watch(Path(tempfile.gettempdir()))
    facts: dict[str, Any] = {"listed": set(names) <= set(listed), "imported_by_listing": by_listing}
    before = snapshot()
    with watch.on(), _captured() as output:
        started = time.perf_counter()
        from vericache_conform.subject import resolve

        suite = time.perf_counter()
        try:
            subject = resolve(order["ref"], order["options"])
            spec = subject.spec
        except (Exception, SystemExit) as error:  # noqa: BLE001  # becomes a failed S-01
            return {**facts, "load_error": f"{type(error).__name__}: {error}"}
        if not order["with_transformers"] and "transformers" in sys.modules:
            return {"imports_transformers": True}
        facts["import_seconds"] = time.perf_counter() - suite
        facts["suite_seconds"] = suite - started
        after = snapshot()
        facts["changed"] = sorted(name for name in before if before[name] != after.get(name))
        facts["spec_name"], facts["api_version"] = spec.name, spec.api_version
        try:
            _use(subject)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # other checks say so; what was seen until then counts
            facts["use_error"] = f"{type(error).__name__}: {error}"
    facts["events"] = sorted(set(watch.events))
    facts["output"] = output.text[:2000]
    return facts


def _use(subject: Any) -> None:
    from vericache_conform.case import Case
    from vericache_conform.world import World

    case = Case(subject)
    compressor = case.create()
    world = World(case.layers(), 80)
    made = case.compress(compressor, world, 70)
    if subject.spec.capability("extend") != "no":
        made = case.extend(compressor, made, world, 80)
    made.to_payload()


def _plugin_root(ref: str) -> str | None:
    from importlib.metadata import entry_points

    for entry in entry_points(group="vericache.compressors"):
        if entry.name == ref:
            return entry.module.partition(".")[0]
    return None


class _Watch:
    """Notes writes outside the temporary folder, network use and new processes, by the interpreter's audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.active, self.events = str(allowed.resolve()), False, list[str]()
        sys.addaudithook(self._hook)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in str(mode or "") for letter in "wax+") or (mode is None and bool((flags or 0) & WRITING))
            if writes and not isinstance(path, int):
                self._file("writes", path)
        elif event in FILES:
            self._file(event, arguments[0])
        elif event in NETWORK and not _local(arguments):
            self.events.append(f"network: {event} {arguments[1:2]!r}")
        elif event in PROCESSES:
            self.events.append(f"process: {event} {arguments[0]!r}")

    def _file(self, event: str, path: Any) -> None:
        text = os.path.realpath(os.fsdecode(path))
        if not (text.startswith(self.allowed) or text == os.devnull or text.endswith(".pyc") or "__pycache__" in text):
            self.events.append(f"file: {event} {text}")


def _local(arguments: tuple[Any, ...]) -> bool:
    """Whether a socket event concerns this machine only: libraries bind ``::1`` to see whether there is IPv6."""
    address = arguments[1] if len(arguments) > 1 else None
    return isinstance(address, tuple) and bool(address) and str(address[0]) in ("::1", "127.0.0.1", "localhost")


class _Output:
    text = ""


@contextmanager
def _captured() -> Iterator[_Output]:
    """Catch what is written to the descriptors 1 and 2, native code included."""
    result = _Output()
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield result
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            sink.seek(0)
            result.text = sink.read().decode(errors="replace")


def snapshot() -> dict[str, Any]:
    """Global state that an import must leave alone, by name."""
    import hashlib
    import logging
    import random
    import signal
    import warnings

    import numpy as np
    import torch

    functions = {
        f"torch.nn.functional.{name}": torch.nn.functional
        for name in ("scaled_dot_product_attention", "softmax", "linear", "silu")
    }
    functions |= {f"torch.{name}": torch for name in ("argmax", "topk", "matmul", "softmax", "load")}
    taken: dict[str, Any] = {name: id(getattr(home, name.rpartition(".")[2])) for name, home in functions.items()}
    hooks = torch.nn.modules.module
    return (
        taken
        | _transformers()
        | {
            "global forward hooks of torch": [
                len(vars(hooks).get(f"_global_{k}", ())) for k in ("forward_hooks", "forward_pre_hooks")
            ],
            "torch thread count": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "torch default dtype": str(torch.get_default_dtype()),
            "torch default device": str(torch.get_default_device()),
            "torch gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "torch determinism flags": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
            "torch float32 precision": torch.get_float32_matmul_precision(),
            "torch print options": repr(vars(torch._tensor_str.PRINT_OPTS)),  # noqa: SLF001  # there is no public reader
            "torch random generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
            "numpy random generator": hashlib.sha256(repr(np.random.get_state()).encode()).hexdigest(),  # noqa: NPY002
            "Python random generator": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
            "numpy error handling": repr(np.geterr()),
            "logging handlers": (len(logging.root.handlers), logging.root.level, logging.root.disabled),
            "warnings filters": [repr(entry) for entry in warnings.filters if entry[2] is not DeprecationWarning],
            "environment variables": sorted(os.environ.items()),
            "signal handlers": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
            "standard streams": (id(sys.stdout), id(sys.stderr), id(sys.excepthook)),
            "working directory": str(Path.cwd()),
            "recursion limit": sys.getrecursionlimit(),
            "import hooks": [repr(finder) for finder in (*sys.meta_path, *sys.path_hooks)],
        }
    )


def _transformers() -> dict[str, Any]:
    """What of transformers could be patched; nothing as long as nobody has imported it."""
    if "transformers.modeling_utils" not in sys.modules:
        return {}
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    return {
        "attention functions of transformers": [(k, id(ALL_ATTENTION_FUNCTIONS[k])) for k in sorted(ALL_ATTENTION_FUNCTIONS)],
        "mask functions of transformers": [
            (k, id(ALL_MASK_ATTENTION_FUNCTIONS[k])) for k in sorted(ALL_MASK_ATTENTION_FUNCTIONS)
        ],
        "PreTrainedModel": sorted((k, id(v)) for k, v in vars(PreTrainedModel).items()),
    }
