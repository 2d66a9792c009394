"""The calibration file: costs of a model on a machine, acceptance priors of compressors, and whose they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.hazard import Prior

SCHEMA: Final = "vericache.calibration/2"
"""Version 1 had costs of attention that were to be added up."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a calibration depends on. Costs of anything else would steer silently into slow choices.

    Attributes:
        processor: model name of the CPU or GPU that computes.
        threads: CPU threads.
        torch: version.
        model: name of the model.
        weights: digest of its weights.
        dtype: of weights and KV.
    """

    processor: str
    threads: int
    torch: str
    model: str
    weights: str
    dtype: str


@dataclass(frozen=True)
class Calibration:
    """Content of a calibration file.

    Attributes:
        fingerprint: where it holds.
        costs: of steps and swaps.
        priors: hazard of compressors by :func:`prior_key`, measured before serving.
        link_bytes_per_s: limit of the link that is in the costs of swaps; None for the machine's own speed.

    Raises:
        ValueError: such a limit cannot be.
    """

    fingerprint: Fingerprint
    costs: CostModel
    priors: Mapping[str, Prior] = field(default_factory=dict)
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.link_bytes_per_s is not None and not 0 < self.link_bytes_per_s < math.inf:
            raise ValueError(f"link_bytes_per_s is {self.link_bytes_per_s}")

    def check_link(self, name: str, limit: float | None) -> None:
        """Refuse an engine that may use more of the link than the costs in this file, called ``name``, know of.

        Raises:
            ConfigError: it may.
        """
        known = self.link_bytes_per_s
        if known is not None and (limit is None or limit > known):
            raise ConfigError(
                f"{name} was measured with link_bytes_per_s={known:g}",
                cause="this engine has none" if limit is None else f"this engine has {limit:g}",
                hint="calibrate without a limit, or with the same one",
            )

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the file, replacing a former one in one go.

        Raises:
            ConfigError: it cannot be written.
        """
        document = {
            "schema": SCHEMA,
            "fingerprint": asdict(self.fingerprint),
            "costs": self.costs.to_json(),
            "priors": {key: asdict(prior) for key, prior in self.priors.items()},
            "link_bytes_per_s": self.link_bytes_per_s,
        }
        path = Path(file)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ConfigError(f"calibration file {str(path)!r} cannot be written", cause=str(error)) from error


def load_calibration(file: str | os.PathLike[str], expected: Fingerprint | None = None) -> Calibration:
    """Read a calibration file; ``expected`` says what it must have been made with (None: anything, for simulations).

    Raises:
        ConfigError: it is missing, broken, of another version, or of another machine or model.
    """
    name = os.fspath(file)
    again = "make a new one with `vericache calibrate`"
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"calibration file {name!r} does not exist", hint=again) from None
    except OSError as error:
        raise ConfigError(f"calibration file {name!r} cannot be read", cause=error.strerror) from error
    except ValueError as error:
        raise ConfigError(f"{name}: not a calibration file", cause=str(error), hint=again) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{name}: not a calibration file of this version", cause=f"{schema!r}, not {SCHEMA!r}", hint=again)
    calibration = _parse(name, document, again)
    if expected is not None:
        found, wanted = asdict(calibration.fingerprint), asdict(expected)
        differing = [f"{key} {found[key]!r} there, {wanted[key]!r} here" for key in wanted if found[key] != wanted[key]]
        if differing:
            raise ConfigError(
                f"{name} was measured on another machine or model", cause="; ".join(differing), hint=f"{again}, or leave it out"
            )
    return calibration


def _parse(name: str, document: Mapping[str, Any], hint: str) -> Calibration:
    try:
        fingerprint = Fingerprint(**document["fingerprint"])
        costs = CostModel.from_json(document["costs"])
        priors = {str(key): Prior(**prior) for key, prior in document["priors"].items()}
        return Calibration(fingerprint, costs, priors, document["link_bytes_per_s"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name}: the calibration file is damaged", cause=cause, hint=hint) from error


def prior_key(compressor: str, options: Mapping[str, Any]) -> str:
    """Return the name under which a compressor with these options has its prior.

    Neither their order matters nor whether a number came as text, as from a command line.
    """
    return f"{compressor} {json.dumps({key: _number(value) for key, value in options.items()}, sort_keys=True, default=str)}"


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def processor_name() -> str:
    """Return the model name of this machine's CPU, as well as it is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "Hardware"} and value.strip():
            return value.strip()
    import platform

    return platform.processor() or platform.machine() or "unknown"
