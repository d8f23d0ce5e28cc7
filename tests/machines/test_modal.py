"""The programs for Modal: what they define, by Modal's package, and their functions, which run here.

Modal itself was not reached: neither the images nor the containers were made there.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from specq import Client
from specq.config import free_address
from specq.testing.waiting import wait_until
from tests.conftest import Spawn
from tests.machines.small_model import write_model

pytestmark = [pytest.mark.machines, pytest.mark.timeout(200)]
EXAMPLES = Path(__file__).parents[2] / "examples"
UP_S = 90
FUNCTIONS = {"modal_verifier": "verify", "modal_service": "serve"}
HOST = "team--specq-service-serve.modal.run"


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def closure(image: Any) -> dict[str, Any]:
    """Return what Modal's loader of a layer of an image knows. There is no public way without their servers."""
    load = next((value for name, value in vars(image).items() if name.startswith("_sync_original")), image)._load
    return dict(zip(load.__code__.co_freevars, (cell.cell_contents for cell in load.__closure__), strict=True))


def layers(image: Any) -> Iterator[dict[str, Any]]:
    while image is not None:
        found = closure(image)
        yield found
        bases = found.get("base_images") or {"base": found.get("base_image")}
        image = next(iter(bases.values()), None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_defined(name: str):
    module = imported(name)
    function = getattr(module, FUNCTIONS[name])
    assert module.app.name == name.replace("modal_", "specq-")
    assert function._spec_.gpus == "H200"
    assert [str(secret) for secret in function._spec_.secrets] == [f"modal.Secret.from_name('{module.app.name}')"]
    assert list(function._spec_.volumes) == ["/models"]
    assert function._is_web_endpoint() == (name == "modal_service")
    found = list(layers(module.image))
    files = [layer["dockerfile_function"]("2025.06") for layer in found if "dockerfile_function" in layer]
    commands = "\n".join(command for file in files for command in file.commands)
    assert "apt-get install -y gcc libc6-dev" in commands
    assert ("'vllm>=" if name == "modal_verifier" else "'torch>=") in commands
    assert "pyzmq" in commands
    (mount,) = [layer["mount"] for layer in found if "mount" in layer]
    copied = {remote.as_posix() for entry in mount.entries for _, remote in entry.get_files_to_upload()}
    assert {"/root/specq/__main__.py", "/root/specq/gateway/page/index.html"} <= copied
    assert not any("__pycache__" in file for file in copied)


def started(spawn: Spawn, code: str, **environment: str) -> subprocess.Popen[bytes]:
    given = [
        f"{name}={value}" for name, value in {**environment, "PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}.items()
    ]
    return spawn("-W", "ignore", "-c", code, program=("env", *given, sys.executable))


def test_the_verifier_serves_a_broker_elsewhere(spawn: Spawn, tmp_path: Path):
    hub, address = tmp_path / "hub", free_address()
    for key in (("hub", "broker"), ("gpu", "target"), ("alice", "client")):
        subprocess.run([sys.executable, "-m", "specq", "keys", hub, key[0], "--role", key[1]], check=True, timeout=60)
    (tmp_path / "alice").mkdir()
    for file in ("alice.secret", "hub.pub"):
        shutil.copy(hub / file, tmp_path / "alice")
    spawn("broker", f"--bind={address}", f"--keys={hub}", "--journal=none")
    secrets = {"GPU_SECRET": (hub / "gpu.secret").read_text(), "HUB_PUB": (hub / "hub.pub").read_text()}
    code = f"import modal_verifier as m; raise SystemExit(m.verify.local({address!r}, {str(write_model(tmp_path))!r}))"

    process = started(spawn, code, **secrets)

    with Client(address, keys=str(tmp_path / "alice")) as client:
        client.wait_until_ready(timeout_s=UP_S)
        assert client.generate("a day", max_tokens=8, temperature=0).token_ids
        process.send_signal(signal.SIGINT)  # as Modal does before it takes a container away
        assert process.wait(60) == 0
        wait_until(lambda: not client.status()["models"])


def test_the_service_answers(spawn: Spawn, tmp_path: Path):
    port, model = free_address().rpartition(":")[2], str(write_model(tmp_path))
    api = [sys.executable, "-m", "specq", "keys", "api", "alice", "--file", tmp_path / "api-keys.toml"]
    key = next(
        word
        for word in subprocess.run(api, check=True, capture_output=True, text=True, timeout=60).stdout.split()
        if word.startswith("sk-specq-")
    )
    secrets = {"API_KEYS": (tmp_path / "api-keys.toml").read_text(), "HOSTS": HOST}
    code = (
        "import signal, modal_service as m; process = m.serve.local(); "
        "signal.signal(signal.SIGTERM, lambda *_: process.terminate()); raise SystemExit(process.wait())"
    )

    started(spawn, code, **secrets, SERVICE_PORT=port, TARGET_MODEL=model, DRAFT_MODEL=model)

    def ask(**headers: str) -> int:
        body = {"model": model, "prompt": "a day", "max_tokens": 8}
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            answer = httpx2.post(url, json=body, headers={"host": HOST, **headers}, trust_env=False, timeout=60)
        except httpx2.TransportError:
            return 0
        return answer.status_code

    wait_until(lambda: ask(authorization=f"Bearer {key}") == 200, UP_S)
    assert ask() == 401
    assert ask(authorization=f"Bearer {key}", host="evil.example.org") == 421
