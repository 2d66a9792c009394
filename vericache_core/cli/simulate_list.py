"""``vericache simulate --list``: devices and models that the simulator knows by name."""

from __future__ import annotations

from vericache_core.cli.output import note, print_json, print_table
from vericache_core.simulate.hardware import DEVICES, MODELS


def run(*, as_json: bool) -> int:
    """Print them."""
    if as_json:
        devices = [
            {
                "name": device.name,
                "memory_bytes": device.memory,
                "memory_bytes_per_s": device.bandwidth,
                "link_bytes_per_s": device.link,
                "flops": device.flops,
                "source": device.source,
            }
            for device in DEVICES.values()
        ]
        models = [
            {"name": model.name, "weight_bytes": model.weights, "kv_bytes_per_token": model.token_bytes, "layers": model.layers}
            for model in MODELS.values()
        ]
        print_json("vericache.simulate.list/1", {"devices": devices, "models": models})
        return 0
    note("bandwidths in GB/s, effective for links; sources with --json")
    print_table(
        ["DEVICE", "MEMORY GB", "BANDWIDTH", "LINK", "RATIO", "TFLOPS"],
        [
            [
                device.name,
                f"{device.memory / 1e9:.0f}",
                f"{device.bandwidth / 1e9:.0f}",
                f"{device.link / 1e9:.0f}",
                f"{device.bandwidth / device.link:.0f}",
                f"{device.flops / 1e12:.1f}",
            ]
            for device in DEVICES.values()
        ],
    )
    print()
    print_table(
        ["MODEL", "WEIGHTS GB", "KV KB/TOKEN", "LAYERS"],
        [
            [model.name, f"{model.weights / 1e9:.2f}", f"{model.token_bytes / 1024:.1f}", str(model.layers)]
            for model in MODELS.values()
        ],
    )
    return 0
