"""The deployment files as data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
Object = dict[str, Any]


def compose() -> Object:
    """The compose file, with anchors and merge keys resolved."""
    found: Object = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def kustomization() -> Object:
    found: Object = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    return found


def objects() -> list[Object]:
    """Every Kubernetes object, in the order of the kustomization."""
    paths = [DEPLOY / "kubernetes" / name for name in kustomization()["resources"]]
    return [found for path in paths for found in yaml.safe_load_all(path.read_text())]


def of_kind(*kinds: str) -> list[Object]:
    return [found for found in objects() if found["kind"] in kinds]


def workloads() -> list[Object]:
    return of_kind("StatefulSet", "Deployment")


def pod(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]
    return found


def containers() -> Iterator[tuple[str, Object, Object]]:
    """Name of the workload, its pod, each of its containers."""
    for workload in workloads():
        for container in pod(workload)["containers"]:
            yield workload["metadata"]["name"], pod(workload), container


def command_lines() -> dict[str, list[str]]:
    """Arguments of ``vericache`` by where they are written."""
    found = {f"compose {name}": service["command"] for name, service in compose()["services"].items()}
    found |= {f"kubernetes {name}": container["args"] for name, _, container in containers()}
    return found
