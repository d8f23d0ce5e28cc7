"""Each overlay is valid for the API, what it names exists, and the commands' options are known. Nothing is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from specq.__main__ import main
from specq.config import BrokerConfig, DraftConfig, ServeConfig, TargetConfig
from specq.gateway.metrics import TABLE
from specq.protocol import split_addresses
from tests.machines import manifests
from tests.machines.manifests import FOLDER, OVERLAYS, ROOT, VARIABLE, Manifest, main_container, pod, workloads

pytestmark = [pytest.mark.machines, pytest.mark.parametrize("overlay", OVERLAYS)]
NAME = "app.kubernetes.io/name"
CLUSTER = (ROOT / "docs" / "guides" / "cluster.md").read_text()
ROLES = {"broker": BrokerConfig, "gateway": ServeConfig, "verifier": TargetConfig, "drafter": DraftConfig}
PODS = {"POD_NAME": "pod-0", "INDEX": "0", "THREADS": "4"}


def probes(container: Manifest) -> list[Manifest]:
    return [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness") if f"{kind}Probe" in container]


def command(overlay: str, container: Manifest) -> list[str]:
    variables = manifests.environment(overlay, container, **PODS)
    return [manifests.expanded(part, variables) for part in container["command"] + container.get("args", [])]


def selected(selector: Manifest) -> set[str]:
    """Return the names of the workloads that a selector names."""
    labels, rules = selector.get("matchLabels", {}), selector.get("matchExpressions", [])
    assert set(labels) <= {NAME}
    return {labels[NAME]} if labels else {name for rule in rules for name in rule["values"]}


def test_objects_are_valid(overlay: str):
    import kubernetes_validate

    for one in manifests.rendered(overlay):
        kubernetes_validate.validate(one, "1.37", strict=True)
    assert set(workloads(overlay)) == set(ROLES)


def test_mistakes_are_found(overlay: str):
    import kubernetes_validate

    wrong = workloads(overlay)["broker"] | {"spec": {"replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_names_exist(overlay: str):
    """Objects, variables, volumes, files below mounts, ports. The guide creates what the manifests only refer to."""
    maps = {one["metadata"]["name"] for one in manifests.of_kind(overlay, "ConfigMap")}
    for workload in workloads(overlay).values():
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        for volume in volumes.values():
            name = volume.get("secret", {}).get("secretName") or volume.get("persistentVolumeClaim", {}).get(
                "claimName"
            )
            assert name is None or re.search(rf"\b{name}\b", CLUSTER), f"the guide does not create {name}"
        for container in [main_container(workload), *pod(workload).get("initContainers", [])]:
            assert {source["configMapRef"]["name"] for source in container.get("envFrom", [])} <= maps
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= set(volumes)
            named = " ".join(command(overlay, container))
            assert not VARIABLE.search(named)
            for path in re.findall(r"(?<=[= ])/(?:etc|models|scratch)[^\s?]*|(?<=sslrootcert=)\S+", named):
                assert any(path.startswith(mount) for mount in mounts), path
        container = main_container(workload)
        ports = {port["name"] for port in container.get("ports", [])}
        assert {probe["httpGet"]["port"] for probe in probes(container) if "httpGet" in probe} <= ports
        assert "registry.example.org/specq" in container["image"]


def test_services_budgets_policies_and_scaling_concern_what_is_there(overlay: str):
    found = workloads(overlay)
    for name, workload in found.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels[NAME] == name == selected(workload["spec"]["selector"]).pop()
    for service in manifests.of_kind(overlay, "Service"):
        (port,), container = service["spec"]["ports"], main_container(found[service["spec"]["selector"][NAME]])
        assert port["targetPort"] in [one["name"] for one in container["ports"]]
    budgets = [selected(one["spec"]["selector"]) for one in manifests.of_kind(overlay, "PodDisruptionBudget")]
    assert sorted(name for (name,) in budgets) == sorted(found)
    for policy in manifests.of_kind(overlay, "NetworkPolicy"):
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        peers = [
            peer["podSelector"]
            for rule in rules
            for side in ("from", "to")
            for peer in rule.get(side, [])
            if "podSelector" in peer
        ]
        for selector in [policy["spec"]["podSelector"], *peers]:
            assert selected(selector) <= set(found)
        known = {port[key] for one in found.values() for port in main_container(one).get("ports", []) for key in port}
        assert {port["port"] for rule in rules for port in rule["ports"]} <= known | {53, 5432}
    rules = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    series = {line.name for line in TABLE}
    for rule in rules:
        assert set(re.findall(r"specq_\w+", rule["metricsQuery"])) <= series
    for scaler in manifests.of_kind(overlay, "HorizontalPodAutoscaler"):
        target = found[scaler["spec"]["scaleTargetRef"]["name"]]
        assert (target["kind"], target["spec"].get("replicas")) == (scaler["spec"]["scaleTargetRef"]["kind"], None)
        (metric,) = scaler["spec"]["metrics"]
        assert metric["external"]["metric"]["name"] in [rule["name"]["as"] for rule in rules]


def test_clients_and_workers_know_each_broker(overlay: str):
    found = workloads(overlay)
    num_brokers = found["broker"]["spec"]["replicas"]
    names = {f"tcp://broker-{i}.{found['broker']['spec']['serviceName']}:5750" for i in range(num_brokers)}
    assert set(split_addresses(manifests.settings(overlay)["SPECQ_BROKER"])) == names
    assert found["gateway"]["spec"]["replicas"] == num_brokers  # gateway-N asks broker-N
    assert num_brokers == (3 if overlay == "brokers" else 1)


def test_pods_are_confined(overlay: str):
    user = int(re.search(r"^USER (\d+):", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[1])
    for workload in workloads(overlay).values():
        context = pod(workload)["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, user, user)
        assert pod(workload)["automountServiceAccountToken"] is False
        for container in [main_container(workload), *pod(workload).get("initContainers", [])]:
            own = container["securityContext"]
            assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly", False) or mount["name"] in ("scratch", "shm")


def test_options_are_known_and_drains_end_in_time(overlay: str, monkeypatch: pytest.MonkeyPatch):
    """The GPU overlay's commands are only read here: they need GPUs."""
    received: list[Any] = []
    monkeypatch.setattr("specq.processes.broker.run", lambda config: received.append(config) or 0)
    monkeypatch.setattr("specq.processes.gateway.run", lambda config: received.append(config) or 0)
    monkeypatch.setattr("specq.cli.services.resolve", lambda *_: lambda config: received.append(config) or 0)
    for name, workload in workloads(overlay).items():
        container = main_container(workload)
        program, *arguments = command(overlay, container)
        env = manifests.environment(overlay, container, **PODS)
        ended = CliRunner().invoke(main, arguments, env=env)
        assert (program, ended.exit_code) == ("specq", 0), ended.output
        config = received.pop()
        assert isinstance(config, ROLES[name])
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = getattr(config, "drain_seconds", 0)
        assert pod(workload)["terminationGracePeriodSeconds"] >= before + drain + 10
        if name != "broker":
            assert config.broker.endswith(manifests.settings(overlay)["SPECQ_BROKER"])


def test_the_image_is_made_of_what_is_here(overlay: str):
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [
        part for line in lines if line.startswith("COPY ") and "--from" not in line for part in line.split()[1:-1]
    ]
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    assert [part for part in copied if not (ROOT / part).exists()] == []
    assert {stage[1] for stage in stages if ":" not in stage[1]} <= {stage[3] for stage in stages}
    assert {"cpu", "cuda"} <= {stage[3] for stage in stages}
