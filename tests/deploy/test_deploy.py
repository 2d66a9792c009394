"""Compose file, image and Kubernetes manifests: schemas, linters, and whether their parts fit together.

No container engine runs here. What is checked is the form, and every command line against the real parser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    DEPLOY,
    command_lines,
    compose,
    containers,
    kustomization,
    objects,
    of_kind,
    pod,
    workloads,
)
from vericache_core._version import __version__
from vericache_core.cli.main import PROGRAM
from vericache_core.service.http import Service, split_address

ROOT = DEPLOY.parent
DRAIN_SECONDS = 30
"""Default of `draining`, which drafters use; a store is told."""


def lint(*command: str | Path) -> None:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- form ----------------------------------------------------------------------------------------------


def test_every_yaml_file_passes_yamllint() -> None:
    lint("yamllint", "--strict", "-c", DEPLOY / ".yamllint.yaml", DEPLOY)


def test_the_compose_file_is_valid() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


@pytest.mark.skipif(not shutil.which("hadolint", path=str(Path(sys.executable).parent)), reason="no hadolint for this platform")
def test_the_dockerfile_passes_hadolint() -> None:
    lint("hadolint", DEPLOY / "Dockerfile")


@pytest.mark.parametrize("version", ["1.30.0", "1.37.0"])
def test_every_object_is_valid_and_has_no_unknown_field(version: str) -> None:
    for found in objects():
        kubernetes_validate.validate(found, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    found = of_kind("StatefulSet")[0]
    found["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(found, "1.37.0", strict=True)


def test_the_kustomization_names_every_file() -> None:
    there = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization()["resources"]) == there
    assert all(found["metadata"].get("namespace", "vericache") == "vericache" for found in objects())


# -- command lines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", command_lines())
def test_every_command_line_is_one_that_the_program_takes(where: str) -> None:
    PROGRAM.parse(command_lines()[where])


def option(arguments: list[str], name: str) -> str:
    (value,) = [text.partition("=")[2] for text in arguments if text.startswith(f"--{name}=")]
    return value


def test_roles_listen_and_connect_where_the_others_are() -> None:
    lines = command_lines()
    for where in ("compose", "kubernetes"):
        _, port = split_address(option(lines[f"{where} store"], "listen"))
        host, remote = split_address(option(lines[f"{where} drafter"], "remote"))
        assert port == remote
        assert host.partition(".")[0] == "store"


# -- Kubernetes ----------------------------------------------------------------------------------------


def labels(workload: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def selected(selector: dict[str, str]) -> list[str]:
    return [found["metadata"]["name"] for found in workloads() if selector.items() <= labels(found).items()]


def test_selectors_find_exactly_what_they_mean() -> None:
    for found in workloads():
        assert selected(found["spec"]["selector"]["matchLabels"]) == [found["metadata"]["name"]]
    for found in of_kind("Service"):
        assert selected(found["spec"]["selector"]) == [found["metadata"]["name"]]
    for found in of_kind("PodDisruptionBudget"):
        assert selected(found["spec"]["selector"]["matchLabels"]) == [found["metadata"]["name"]]
    for found in of_kind("HorizontalPodAutoscaler"):
        target = found["spec"]["scaleTargetRef"]
        (scaled,) = [w for w in workloads() if (w["kind"], w["metadata"]["name"]) == (target["kind"], target["name"])]
        assert "replicas" not in scaled["spec"], "two owners of one number"
    for found in of_kind("NetworkPolicy"):
        rules = [*found["spec"].get("ingress", []), *found["spec"].get("egress", [])]
        peers = [
            peer["podSelector"]
            for rule in rules
            for peer in [*rule.get("from", []), *rule.get("to", [])]
            if "podSelector" in peer
        ]
        for selector in [found["spec"]["podSelector"], *peers]:
            assert selected(selector.get("matchLabels", {}))


def test_by_default_nothing_gets_in_or_out_and_only_drafters_reach_a_store() -> None:
    policies = {found["metadata"]["name"]: found["spec"] for found in of_kind("NetworkPolicy")}
    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (rule,) = policies["store-from-drafters"]["ingress"]
    assert [selected(peer["podSelector"]["matchLabels"]) for peer in rule["from"]] == [["drafter"]]
    assert rule["ports"] == [{"protocol": "TCP", "port": "verify"}]


def test_every_named_port_is_one_that_its_command_listens_on() -> None:
    for name, _, container in containers():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == split_address(option(container["args"], "metrics"))[1]
        if name == "store":
            assert ports["verify"] == split_address(option(container["args"], "listen"))[1]
        (service,) = [found for found in of_kind("Service") if found["metadata"]["name"] == name]
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
        annotations = next(w for w in workloads() if w["metadata"]["name"] == name)["spec"]["template"]["metadata"][
            "annotations"
        ]
        assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_probes_ask_what_the_service_answers() -> None:
    service = Service("127.0.0.1", 0)
    service.state = "ready"
    for _, _, container in containers():
        for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
            asked = container[probe]["httpGet"]
            assert (asked["path"], asked["port"]) == (path, "metrics")
            assert service.answer(asked["path"], "")[0] == 200
    service.close()


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    for _, found, container in containers():
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pause > 0
        assert found["terminationGracePeriodSeconds"] > pause + DRAIN_SECONDS
    for service in compose()["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


def test_stores_take_as_long_to_drain_as_drafters() -> None:
    for where, arguments in command_lines().items():
        if where.endswith(" store"):
            assert PROGRAM.parse(arguments)[1].grace == DRAIN_SECONDS


def test_drafters_are_asked_on_standard_input_so_it_stays_open() -> None:
    for where, arguments in command_lines().items():
        if where.endswith(" drafter"):
            assert PROGRAM.parse(arguments)[1].prompts == []
    assert [container.get("stdin", False) for name, _, container in containers() if name == "drafter"] == [True]
    assert compose()["services"]["drafter"]["stdin_open"] is True


def test_nothing_runs_as_root_or_writes_where_it_should_not() -> None:
    for _, found, container in containers():
        context = found["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert found["automountServiceAccountToken"] is False
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        written = {name for name, mount in mounts.items() if not mount.get("readOnly")}
        assert written <= {"blobs", "tmp"}
    for service in compose()["services"].values():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "privileged" not in service


def test_mounts_hold_what_the_commands_read() -> None:
    for name, found, container in containers():
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claims = [claim["metadata"]["name"] for w in workloads() for claim in w["spec"].get("volumeClaimTemplates", [])]
        volumes = {volume["name"] for volume in found["volumes"]} | (set(claims) if name == "store" else set())
        assert mounts.keys() == volumes
        assert_read(container["args"], list(mounts.values()))
    for service in compose()["services"].values():
        there = [volume["target"] for volume in service["volumes"]]
        assert_read(service["command"], [*there, *(f"/run/secrets/{name}" for name in service["secrets"])])


def assert_read(arguments: list[str], mounted: list[str]) -> None:
    paths = [value for _, _, value in (text.partition("=") for text in arguments) if value.startswith("/")]
    assert paths
    for path in paths:
        assert any(path == folder or path.startswith(f"{folder}/") for folder in mounted), path


def test_secrets_are_named_and_never_written_down() -> None:
    assert not of_kind("Secret")
    for found in workloads():
        names = {volume["secret"]["secretName"] for volume in pod(found)["volumes"] if "secret" in volume}
        assert names == {"vericache-token", f"vericache-{found['metadata']['name']}-tls"}
    for secret in compose()["secrets"].values():
        assert secret.keys() == {"file"}
        assert not (DEPLOY / secret["file"]).exists()
    for path in DEPLOY.rglob("*"):
        assert path.is_dir() or "PRIVATE KEY" not in path.read_text()


def test_images_are_of_this_version_and_never_the_latest() -> None:
    images = {container["image"] for _, _, container in containers()}
    images |= {service["image"] for service in compose()["services"].values()}
    assert images == {f"vericache:{__version__}"}


def test_the_image_runs_as_the_user_of_the_manifests_with_the_torch_of_the_makefile() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = text.split("\nFROM ")
    assert re.search(r"^USER 10001:10001$", stages[-1], re.MULTILINE)
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-slim", text, re.MULTILINE)
    (torch,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", text, re.MULTILINE)
    assert f"TORCH  ?= torch=={torch}\n" in (ROOT / "Makefile").read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists()
            assert f"!{name}\n" in (DEPLOY / "Dockerfile.dockerignore").read_text()
    for name in re.findall(r"\./(compressors/\w+)", text):
        assert (ROOT / name / "pyproject.toml").exists()
