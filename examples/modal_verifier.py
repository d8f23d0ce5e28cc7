"""A verifier on a GPU of Modal for a broker elsewhere. It only dials out, so it needs no open port and no tunnel.

modal secret create specq-verifier GPU_SECRET="$(cat keys/gpu.secret)" HUB_PUB="$(cat keys/hub.pub)"
modal run --detach examples/modal_verifier.py --broker tcp://hub.example.org:5750 --model /models/target

`specq keys keys gpu --role target` makes the key; docs/guides/edge.md says which files the broker needs. The volume
`models` has the models: modal volume put models ./target.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[1]
DRAIN_S = 20  # Modal gives a container 30 seconds to end
FILES = {"GPU_SECRET": "gpu.secret", "HUB_PUB": "hub.pub"}  # keys of the secret, and the files in the directory of keys

app = modal.App("specq-verifier")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), optional_dependencies=["vllm"])
    .add_local_dir(ROOT / "specq", "/root/specq", ignore=["**/__pycache__"])
)


@app.function(
    image=image,
    gpu="H200",
    secrets=[modal.Secret.from_name("specq-verifier", required_keys=list(FILES))],
    volumes={"/models": modal.Volume.from_name("models")},
    timeout=24 * 3600,
)
def verify(broker: str, model: str, engine: str = "auto") -> int:
    """Verify for a broker until the container is asked to stop (SIGINT), then drain. Return the exit status."""
    with tempfile.TemporaryDirectory() as keys:
        for name, file in FILES.items():
            path = Path(keys) / file
            path.touch(mode=0o600)
            path.write_text(os.environ[name])
        options = ["--bind=none", f"--broker={broker}", f"--keys={keys}", f"--model={model}", f"--engine={engine}"]
        command = [sys.executable, "-m", "specq", "worker", "--role=target", f"--drain-seconds={DRAIN_S}", *options]
        process = subprocess.Popen(command, start_new_session=True)  # it gets no SIGINT of its own
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return process.wait(DRAIN_S + 5)


@app.local_entrypoint()
def main(broker: str, model: str = "/models/target", engine: str = "vllm") -> None:
    verify.remote(broker, model, engine)
