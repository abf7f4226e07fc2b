"""The manifests: rendered by kustomize, held to the API's schemas and to one another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
GPU = "nvidia.com/gpu"


def render(folder):
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("neither kubectl nor kustomize is installed")


@pytest.fixture(scope="module", params=["base", "cpu"])
def rendered(request):
    return request.param, render(FOLDER / request.param)


def of_kind(objects, *kinds):
    return [each for each in objects if each["kind"] in kinds]


def pods(objects):
    return {
        each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Deployment", "StatefulSet")
    }


def check_schemas(objects):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (PyPI: kubernetes-validate)"
    )
    for each in objects:
        kubernetes_validate.validate(each, "1.34", strict=True)


def test_every_object_fits_its_schema(rendered):
    _, objects = rendered
    assert len(objects) >= 11
    check_schemas(objects)


def test_every_object_as_it_is_written_fits_its_schema():
    """Also where there is no kustomize to render it."""
    listed = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    objects = [each for name in listed for each in yaml.safe_load_all((FOLDER / "base" / name).read_text())]
    assert len(objects) >= 10
    check_schemas(objects)


def test_the_manuals_overlay_can_be_rendered(tmp_path):
    """With the repository's own base in place of an address."""
    text = (FOLDER.parents[1] / "docs" / "deploy.md").read_text()
    overlay = yaml.safe_load(text.partition("```yaml\n# kustomization.yaml\n")[2].partition("```")[0])
    shutil.copytree(FOLDER / "base", tmp_path / "base")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay | {"resources": ["../base"]}))
    objects = render(tmp_path / "overlay")
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "cephfs"
    images = {container["image"] for pod in pods(objects).values() for container in pod["spec"]["containers"]}
    assert images == {"REGISTRY/millrace:cuda"}


def test_pods_are_restricted_as_the_namespace_demands(rendered):
    _, objects = rendered
    (namespace,) = of_kind(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    found = pods(objects)
    assert set(found) == {"millrace", "millrace-scheduler", "millrace-worker"}
    for template in found.values():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"startupProbe", "livenessProbe"} <= set(container)
        assert {"requests", "limits"} == set(container["resources"])


def test_what_is_referred_to_is_there(rendered):
    _, objects = rendered
    found = pods(objects)
    configs = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    for template in found.values():
        spec = template["spec"]
        (container,) = spec["containers"]
        ports = {port["name"] for port in container["ports"]}
        probes = [container[name] for name in container if name.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        assert {source["configMapRef"]["name"] for source in container.get("envFrom", [])} <= configs
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        own = {"state"} if "readinessProbe" in container else set()  # the API's claim template
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes) | own
        named = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert named <= claims
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"]
        matching = [each for each in found.values() if selector.items() <= each["metadata"]["labels"].items()]
        assert len(matching) == 1
        names = {port["name"] for port in matching[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_a_prometheus_that_goes_by_annotations_finds_the_pods_that_tell(rendered):
    """Each at the port by which the operator's pod monitors find it too."""
    _, objects = rendered
    for name, port in (("millrace", "http"), ("millrace-worker", "metrics")):
        template = pods(objects)[name]
        numbers = {each["name"]: str(each["containerPort"]) for each in template["spec"]["containers"][0]["ports"]}
        assert template["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true", "prometheus.io/port": numbers[port], "prometheus.io/path": "/metrics",
        }  # fmt: skip


def test_addresses_in_arguments_are_those_of_services(rendered):
    _, objects = rendered
    services = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in of_kind(objects, "Service")}
    (config,) = of_kind(objects, "ConfigMap")
    (worker,) = pods(objects)["millrace-worker"]["spec"]["containers"]
    address = f"tcp://millrace-scheduler:{services['millrace-scheduler']}"
    assert config["data"]["MILLRACE_SCHEDULER"] == address
    assert address in worker["args"]
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert f"--metrics-port={ports['metrics']}" in worker["args"]


def test_workers_take_a_gpu_each_and_none_on_cpus(rendered):
    name, objects = rendered
    (worker,) = pods(objects)["millrace-worker"]["spec"]["containers"]
    (config,) = of_kind(objects, "ConfigMap")
    if name == "base":
        assert worker["resources"]["limits"][GPU] == worker["resources"]["requests"][GPU] == 1
        assert worker["image"] == "millrace:cuda"
        assert config["data"]["MILLRACE_DEVICE"] == "cuda"
    else:
        assert GPU not in str(worker["resources"])
        assert worker["image"] == "millrace:cpu"
        assert "--device=cpu" in worker["args"]
        assert config["data"]["MILLRACE_DEVICE"] == "cpu"


def test_only_the_tokens_guarded_api_and_the_metrics_can_be_reached(rendered):
    _, objects = rendered
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "NetworkPolicy")}
    found = pods(objects)
    everything = policies.pop("millrace-inside")
    assert everything["podSelector"] == {}
    assert everything["policyTypes"] == ["Ingress", "Egress"]
    opened = set()
    for spec in policies.values():
        for template in found.values():
            if spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
                names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= names
                opened |= {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
    assert opened == {"http", "metrics"}


def test_pod_monitors_select_the_pods():
    """Their schema is the Prometheus operator's: what they name must be there."""
    found = pods(render(FOLDER / "base"))
    monitors = render(FOLDER / "monitoring")
    jobs = set()
    for monitor in monitors:
        assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        (template,) = [each for each in found.values() if selector <= each["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert set(endpoint) == {"port", "path", "interval", "relabelings"}
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        jobs |= {rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"}
    scraped = yaml.safe_load((FOLDER.parent / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert jobs == {job["job_name"] for job in scraped}
