"""Deployment files against public schemas, our own options and the locks; `make test-containers` runs them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILES = {"gateway": GatewayConfig, "engine_core": EngineConfig, "worker": WorkerConfig}
# Every image and the lock that it installs, named like the extra it satisfies.
IMAGES = {
    "gateway/Dockerfile": "gateway",
    "engine_core/Dockerfile": "engine-core",
    "worker/Dockerfile": "worker",
    "worker/Dockerfile.cuda": "worker",
}
ALSO = {"gateway": ("redis",)}
LOCKED = ("build", *dict.fromkeys(IMAGES.values()))
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
def test_image_runs_unprivileged_with_a_healthcheck(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    assert re.search(r"^USER 10001$", text, re.M)
    assert re.search(r"^HEALTHCHECK .*pagoda.*ping", text, re.M)


def requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra, of Pagoda itself, and of what else its image contains."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [project["optional-dependencies"][name] for name in (extra, *ALSO.get(extra, ()))]
    return [Requirement(line) for line in itertools.chain(project["dependencies"], *asked)]


def lock(name: str) -> dict[str, list[str]]:
    """Package -> its locked versions; several if they depend on the version of Python."""
    versions: dict[str, list[str]] = {}
    for name_, version in re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / f"deploy/locks/{name}.txt").read_text(), re.M):
        versions.setdefault(name_, []).append(version)
    return versions


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_sec_28_images_install_what_is_locked_and_nothing_else(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install([^&\n]*)", text)
    assert installs
    for arguments in installs:
        if "torch==" in arguments:
            assert '"torch==${TORCH_VERSION}"' in arguments  # the operator chooses the build, not the version
        elif "/opt/wheel/" in arguments:
            assert "--no-deps" in arguments
        else:
            assert "--require-hashes" in arguments
    locks = set(re.findall(r"-r deploy/locks/([a-z-]+)[.]txt", text))
    assert locks == {"build", IMAGES[dockerfile]}
    assert "pip check" in text
    assert re.findall(r"pip wheel.*--no-build-isolation", text)
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE_IMAGE}"}  # an operator pins it by digest


@pytest.mark.parametrize("name", LOCKED)
def test_sec_28_every_locked_file_has_a_hash(name: str) -> None:
    text = (ROOT / f"deploy/locks/{name}.txt").read_text().replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert entries
    assert all(re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize("extra", dict.fromkeys(IMAGES.values()))
def test_sec_28_locks_satisfy_what_is_asked_for(extra: str) -> None:
    locked = lock(extra)
    unsatisfied = [
        str(wanted)
        for wanted in requirements(extra)
        if wanted.name != "torch"
        and not all(map(wanted.specifier.contains, locked.get(canonicalize_name(wanted.name), ["0"])))
    ]
    assert not unsatisfied, "run: make locks"


def test_sec_28_one_torch_everywhere_and_never_a_second_index() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci/run", ROOT / "docker-compose.yml", *map(ROOT.joinpath, IMAGES)]
    texts = {path.name: path.read_text() for path in files}
    assert not [name for name, text in texts.items() if "--extra-index-url" in text]
    made = re.search(r"^TORCH [?]= torch==(\S+)$", texts["Makefile"], re.M)
    assert made is not None
    images = {match for path in files for match in re.findall(r"^ARG TORCH_VERSION=(\S+)$", path.read_text(), re.M)}
    assert images == {made[1]}
    [asked] = [wanted for wanted in requirements("worker") if wanted.name == "torch"]
    assert asked.specifier.contains(made[1])


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
    assert "compiled:/var/cache/pagoda" in service["volumes"]
    assert "TRITON_CACHE_DIR=/var/cache/pagoda/" in (ROOT / "worker/Dockerfile.cuda").read_text()


def test_compose_starts_nothing_that_nobody_uses() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert set(compose["services"]) == {"engine-core", "gateway", "worker", "worker-gpu"}
    mounted = {mount.split(":")[0] for service in compose["services"].values() for mount in service["volumes"]}
    assert set(compose["volumes"]) <= mounted


def test_images_are_called_alike_in_compose_and_manifests() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    pods = [deployment["spec"]["template"]["spec"] for deployment in deployments()]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert {service["image"] for name, service in compose.items() if name != "worker-gpu"} == images


def test_compose_publishes_only_the_gateway_and_only_on_loopback() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(ports) == ["gateway"]
    assert all(port.startswith("${PUBLISH:-127.0.0.1}:") for port in ports["gateway"])


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


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/k8s/base/gateway.yaml"])
def test_who_is_behind_a_proxy_finds_the_option_where_it_is_set(file: str) -> None:
    [line] = re.findall(r"# +(.*PAGODA_FORWARDED_ALLOW_IPS.*)", (ROOT / file).read_text())
    found = yaml.safe_load(line)
    name, value = (found[0]["name"], found[0]["value"]) if isinstance(found, list) else next(iter(found.items()))
    assert name in environment_names(GatewayConfig)
    assert GatewayConfig(engine="unix:/e", forwarded_allow_ips=value).forwarded_allow_ips


def test_no_probe_asks_for_keys() -> None:
    """Otherwise an expired certificate would make the kubelet kill a working container again and again."""
    for deployment in deployments():
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert "--keys-dir" not in container[name].get("exec", {"command": []})["command"]


def test_an_engine_core_is_alive_while_it_touches_the_file_that_it_is_told() -> None:
    [pod] = [d["spec"]["template"]["spec"] for d in deployments() if d["metadata"]["name"] == "pagoda-engine-core"]
    [container] = pod["containers"]
    [file] = [entry["value"] for entry in container["env"] if entry["name"] == "PAGODA_ALIVE_FILE"]
    assert container["livenessProbe"]["exec"]["command"] == ["pagoda", "ping", f"file:{file}"]
    assert any(file.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


def test_a_gateway_is_given_time_to_drain() -> None:
    [pod] = [d["spec"]["template"]["spec"] for d in deployments() if d["metadata"]["name"] == "pagoda-gateway"]
    [container] = pod["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    [command, pre_stop_s] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    probe = container["readinessProbe"]
    assert int(pre_stop_s) >= 2 * probe["periodSeconds"]  # time for load balancers to notice
    margin_s = 10
    drain_s = float(told["PAGODA_DRAIN_TIMEOUT_S"]) + GatewayConfig().lame_duck_s
    assert pod["terminationGracePeriodSeconds"] >= int(pre_stop_s) + drain_s + margin_s


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
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp", "/var/cache/pagoda"}
    manifest = tmp_path / "worker.yaml"
    manifest.write_text(yaml.safe_dump(gpu["Deployment", "pagoda-worker"]))
    run(BIN / "kubernetes-validate", "--strict", manifest)
