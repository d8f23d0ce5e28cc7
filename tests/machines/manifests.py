"""The manifests of configs/kubernetes as kubectl renders them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "brokers")
VARIABLE = re.compile(r"\$\((\w+)\)")
Manifest = dict[str, Any]


def kubectl() -> str:
    """Return the path of the program."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    assert found, "kubectl is not installed: make test-machines"
    return found


@cache
def rendered(overlay: str) -> list[Manifest]:
    """Return the objects of an overlay."""
    command = [kubectl(), "kustomize", str(FOLDER / overlay)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not ended.stderr, ended.stderr  # warnings
    return list(yaml.safe_load_all(ended.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] in kinds]


def workloads(overlay: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in of_kind(overlay, "StatefulSet", "Deployment")}


def pod(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def main_container(workload: Manifest) -> Manifest:
    (container,) = pod(workload)["containers"]
    return container


def settings(overlay: str) -> dict[str, str]:
    """Return the data of the ConfigMap."""
    (found,) = of_kind(overlay, "ConfigMap")
    return found["data"]


def environment(overlay: str, container: Manifest, **pods: str) -> dict[str, str]:
    """Return a container's variables. `pods`: what the downward API would give, by the name of the variable."""
    found = settings(overlay) if container.get("envFrom") else {}
    return found | {
        one["name"]: one["value"] if "value" in one else pods[one["name"]] for one in container.get("env", [])
    }


def expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME), as the kubelet does. A name that is unknown fails here, and stays as it is there."""
    return VARIABLE.sub(lambda found: variables[found[1]], text)
