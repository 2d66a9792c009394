"""Faults of the package and of the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, DropOptions, spec
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor


class OtherName(Drop):
    name = "another-name"


@dataclass(frozen=True, kw_only=True)
class SilentOptions(DropOptions):
    """One field says nothing about itself."""

    strength: float = field(default=1.0)


class UndescribedOption(Drop):
    name = "undescribed-option"


class FutureApi(Drop):
    name = "future-api"


class Prints(Drop):
    name = "prints"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        sys.stdout.write(f"compressing layer {layer.index}\n")
        return super().score(layer, keys, values, context)


class WritesFile(Drop):
    """Writes into the folder of the package (and removes it again): outside of any temporary folder."""

    name = "writes-file"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        path = Path(__file__).with_name(f"statistics-{os.getpid()}.tmp")
        try:
            path.write_text("scores")
            path.unlink()
        except OSError:  # a read-only installation: the attempt is the fault
            return super().score(layer, keys, values, context)
        return super().score(layer, keys, values, context)


class Hangs(Drop):
    name = "hangs"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        threading.Event().wait()
        return super().score(layer, keys, values, context)


class Crashes(Drop):
    name = "crashes"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().score(layer, keys, values, context)


class EatsMemory(Drop):
    name = "eats-memory"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        torch.zeros(1 << 38)  # a terabyte
        return super().score(layer, keys, values, context)


class Exits(Drop):
    name = "exits"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        sys.exit(3)


OTHER_NAME = spec(OtherName, name="other-name")
UNDESCRIBED_OPTION = spec(UndescribedOption, options=SilentOptions)
FUTURE_API = spec(FutureApi, api_version=99)
PRINTS = spec(Prints)
WRITES_FILE = spec(WritesFile)
HANGS = spec(Hangs)
CRASHES = spec(Crashes)
EATS_MEMORY = spec(EatsMemory)
EXITS = spec(Exits)
