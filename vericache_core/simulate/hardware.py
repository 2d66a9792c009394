"""Devices and models as a few numbers, and the cost model that follows from them.

Bandwidths and memory are those of data sheets; ``MEMORY_EFFICIENCY`` and the effective rate of a link say what is
left of them in practice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vericache_core.runtime.calibration import Calibration
from vericache_core.runtime.costs import CostModel, Link

MEMORY_EFFICIENCY: Final = 0.96
"""Of the nominal memory bandwidth; gives the 35 ms of the paper's worked example (60 GB read on an RTX PRO 6000)."""
COMPUTE_EFFICIENCY: Final = 0.6
"""Of the nominal dense bf16 rate, as large matrix products reach it."""
SHAPES: Final = (1, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 256, 512, 1024, 2048)
"""Row shapes of a simulated step; from 8 to 128 those of the engine."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its link to host memory, in bytes, bytes per second and dense bf16 operations per second.

    Attributes:
        link: effective, one way.
        disk: effective, of a local NVMe drive.
        overhead: seconds of a step that are neither reading nor arithmetic.
        copies: whether the cores that compute also copy what is swapped in.
        between: seconds of the host between two steps, for each request that had rows.
        source: where the numbers are from.
    """

    name: str
    memory: float
    bandwidth: float
    link: float
    flops: float
    source: str
    disk: float = 6e9
    overhead: float = 0.0
    copies: bool = False
    between: float = 0.0


DEVICES: Final = {
    device.name: device
    for device in (
        Device(
            "h100-nvl",
            94e9,
            3.9e12,
            50e9,
            835e12,
            "NVIDIA H100 NVL data sheet; PCIe 5.0 x16 as measured by vLLM's KV offloading (50 of 64 GB/s)",
        ),
        Device(
            "rtx-pro-6000",
            96e9,
            1.792e12,
            50e9,
            500e12,
            "NVIDIA RTX PRO 6000 Blackwell data sheet; link as above, which is also the paper's 80 ms for 4 GB",
        ),
        Device(
            "gh200",
            96e9,
            4.0e12,
            400e9,
            990e12,
            "NVIDIA GH200 data sheet; NVLink-C2C 450 GB/s one way, of which about 400 arrive",
        ),
        Device("h200", 141e9, 4.8e12, 50e9, 990e12, "NVIDIA H200 data sheet; link as for the H100 NVL"),
        Device(
            "cpu-2",
            16e9,
            17.9e9,
            17.9e9,
            1.2e12,
            "two cores of an AMD EPYC 9004: measured copy bandwidth, steps of 1 to 128 rows of the demo model",
            disk=1e9,
            overhead=0.045,
            copies=True,
            # The pause between steps in traces of idle runs, by request: 0.27 ms with 8 plain ones, 0.3 to 0.4 drafting, 0.4 to
            # 0.5 with windows and proposals to be chosen, 0.5 with 1 or 2 requests.
            between=3.5e-4,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, with bf16 weights and KV unless given otherwise."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_number: int = 2

    @property
    def weights(self) -> float:
        """Bytes of weights."""
        return self.parameters * self.bytes_per_number

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_number


MODELS: Final = {
    model.name: model
    for model in (
        ModelShape("mistral-24b", 23.6e9, 40, 32, 8, 128),
        ModelShape("qwen-32b", 32.8e9, 64, 40, 8, 128),
        ModelShape("llama-70b", 70.6e9, 80, 64, 8, 128),
        ModelShape("smollm2-135m", 134.5e6, 30, 9, 3, 64),
    )
}


def cost_model(device: Device, model: ModelShape, devices: int = 1) -> CostModel:
    """Costs of ``model`` on ``devices`` devices side by side (tensor parallel, without its communication)."""
    bandwidth = device.bandwidth * devices * (MEMORY_EFFICIENCY if device.overhead == 0 else 1.0)
    flops = device.flops * devices * COMPUTE_EFFICIENCY
    shapes = {rows: device.overhead + max(model.weights / bandwidth, 2 * model.parameters * rows / flops) for rows in SHAPES}
    pair = 4 * model.layers * model.heads * model.head_dim / flops
    links = {"host": Link(1e-4, 1 / (device.link * devices)), "disk": Link(1e-3, 1 / device.disk)}
    return CostModel(shapes, 1 / bandwidth, pair, links, model.layers)


def copying(device: Device, costs: CostModel, tier: str, calibration: Calibration | None) -> float:
    """Seconds that the cores which compute spend on a swapped byte: how long it takes where nothing limits the link.

    Args:
        device: that computes.
        costs: of it, from ``calibration`` if there is one.
        tier: that is swapped from.
        calibration: whose costs know a limited link's time of a byte, and not how long it is copied.

    Raises:
        ConfigError: no cost of that tier is known.
    """
    if not device.copies:
        return 0.0
    costs.swap_seconds(tier, 0.0)  # it says what is wrong if there are no costs
    limited = calibration is not None and calibration.link_bytes_per_s is not None
    return 1 / device.link if limited else costs.links[tier].seconds_per_byte
