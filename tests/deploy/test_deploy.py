"""Deployment files are checked against public schemas and against our own options, since no daemon runs them here."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILES = {"gateway": GatewayConfig, "engine_core": EngineConfig, "worker": WorkerConfig}
# Every image, and the extras that it installs.
IMAGES = {
    "gateway/Dockerfile": "gateway",
    "engine_core/Dockerfile": "engine-core",
    "worker/Dockerfile": "worker",
    "worker/Dockerfile.cuda": "worker,gpu",
}
MANIFESTS = sorted(path for path in (ROOT / "deploy/k8s").rglob("*.yaml") if path.name != "kustomization.yaml")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment_names(config: type) -> set[str]:
    return {"PAGODA_" + field.name.upper() for field in dataclasses.fields(config)}


def test_compose_file_follows_the_compose_specification() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_dockerfile_passes_the_linter(dockerfile: str) -> None:
    run(BIN / "hadolint", dockerfile)


def test_every_dockerfile_is_looked_at() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/Dockerfile*")} == set(IMAGES)


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_image_runs_unprivileged_with_a_healthcheck_and_only_its_own_extra(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    assert re.search(r"^USER 10001$", text, re.M)
    assert re.search(r"^HEALTHCHECK .*pagoda.*ping", text, re.M)
    assert re.findall(r"'\.\[(.+)\]'", text) == [IMAGES[dockerfile]]


def test_extras_of_images_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for names in IMAGES.values() for extra in names.split(",")} <= set(extras)


@pytest.mark.parametrize("service", ["gateway", "engine-core", "worker", "worker-gpu"])
def test_compose_environment_names_real_options(service: str) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = DOCKERFILES[service.removesuffix("-gpu").replace("-", "_")]
    assert set(services[service]["environment"]) <= environment_names(config)


def test_compose_gives_the_gpu_worker_a_gpu_only_when_asked() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["worker-gpu"]
    assert service["profiles"] == ["gpu"]
    assert service["build"]["dockerfile"] == "worker/Dockerfile.cuda"
    assert set(service["build"]["args"]) <= set(
        re.findall(r"^ARG (\w+)", (ROOT / "worker/Dockerfile.cuda").read_text(), re.M)
    )
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert service["tmpfs"] == ["/tmp:exec"]  # compiled kernels are loaded from there


def test_compose_publishes_only_the_gateway_and_only_on_loopback() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(ports) == ["gateway"]
    assert all(port.startswith("127.0.0.1:") for port in ports["gateway"])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifest_is_strictly_valid(manifest: Path) -> None:
    run(BIN / "kubernetes-validate", "--strict", manifest)


def deployments() -> list[dict[str, object]]:
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
    return [document for document in documents if document["kind"] == "Deployment"]


@pytest.mark.parametrize("deployment", deployments(), ids=lambda d: d["metadata"]["name"])
def test_deployment_is_probed_unprivileged_and_names_real_options(deployment: dict) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        config = DOCKERFILES[container["name"].replace("-", "_")]
        assert {entry["name"] for entry in container.get("env", [])} <= environment_names(config)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the kustomization; it is not installed")
def test_kustomization_renders_every_manifest() -> None:
    rendered = list(yaml.safe_load_all(run("kubectl", "kustomize", "deploy/k8s/base")))
    names = {(document["kind"], document["metadata"]["name"]) for document in rendered}
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            assert (document["kind"], document["metadata"]["name"]) in names


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the kustomization; it is not installed")
def test_the_gpu_overlay_changes_the_workers_and_nothing_else(tmp_path: Path) -> None:
    base, gpu = (
        {(document["kind"], document["metadata"]["name"]): document for document in yaml.safe_load_all(rendered)}
        for rendered in (run("kubectl", "kustomize", f"deploy/k8s/{name}") for name in ("base", "overlays/gpu"))
    )
    changed = {name for name in base | gpu if base.get(name) != gpu.get(name)}
    assert changed == {("Deployment", "pagoda-worker")}
    pod = gpu["Deployment", "pagoda-worker"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "pagoda-worker-cuda:0.1.0"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert {entry["name"] for entry in container["env"]} <= environment_names(WorkerConfig)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    manifest = tmp_path / "worker.yaml"
    manifest.write_text(yaml.safe_dump(gpu["Deployment", "pagoda-worker"]))
    run(BIN / "kubernetes-validate", "--strict", manifest)
