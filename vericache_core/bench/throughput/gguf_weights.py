"""A GGUF file with the weights that our engine computes with: quantized tensors widened to one dtype, all else as it is."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from vericache_core.errors import UsageError
from vericache_core.model.load import cache_folder

FORMS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def widened(file: Path, dtype: str) -> Path:
    """The widened file, in the cache folder; written when it is asked for first.

    Quantized tensors are decoded to float32 and rounded to nearest, as the loader of our engine does. Tensors of one axis
    (norms) become float32, which is all that llama.cpp takes there.

    Args:
        file: a GGUF file.
        dtype: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        UsageError: the cache folder cannot be written.
    """
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 22):
            digest.update(block)
    target = cache_folder() / f"gguf-{digest.hexdigest()[:24]}-{dtype}.gguf"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix="partial-", dir=target.parent)
        os.close(handle)
        try:
            _write(file, Path(partial), FORMS[dtype])
            Path(partial).replace(target)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"widened weights could not be kept in {target.parent}", cause=str(error)) from error
    return target


def _write(source: Path, target: Path, form: str) -> None:
    import gguf

    reader = gguf.GGUFReader(str(source))
    kinds: Any = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(target), arch=_architecture(reader))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1]
        writer.add_key_value(field.name, field.contents(), kind, inner if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = kinds["F32" if values.ndim == 1 else form]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(reader: Any) -> str:
    name: str = reader.fields["general.architecture"].contents()
    return name
