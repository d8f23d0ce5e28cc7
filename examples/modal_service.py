"""The whole service on one GPU of Modal, behind an HTTPS address of Modal: broker, verifier, draft model, gateway.

specq keys api alice --file api-keys.toml      # prints the key for Alice's requests
modal secret create specq-service API_KEYS="$(cat api-keys.toml)" HOSTS=WORKSPACE--specq-service-serve.modal.run
modal deploy examples/modal_service.py         # prints the address

The volume `models` has the models. Jobs end with the container, unless the secret has JOURNAL=postgresql://...
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[1]
PORT = int(os.environ.get("SERVICE_PORT", "8000"))
CONFIG = """
[serve]
insecure = true     # Modal ends TLS; the API keys stay
batches = "none"
"""

app = modal.App("specq-service")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), optional_dependencies=["torch", "postgres"])
    .add_local_dir(ROOT / "specq", "/root/specq", ignore=["**/__pycache__"])
)


@app.function(
    image=image,
    gpu="H200",
    secrets=[modal.Secret.from_name("specq-service", required_keys=["API_KEYS", "HOSTS"])],
    volumes={"/models": modal.Volume.from_name("models")},
    max_containers=1,
    scaledown_window=600,
    timeout=24 * 3600,
)
@modal.concurrent(max_inputs=64)
@modal.web_server(PORT, startup_timeout=900)
def serve() -> subprocess.Popen[bytes]:
    """Start the service, and return: Modal sends requests when the port answers. The secret may name other models."""
    place = Path(tempfile.mkdtemp())
    for name, text in (("specq.toml", CONFIG), ("api-keys.toml", os.environ["API_KEYS"])):
        (place / name).touch(mode=0o600)
        (place / name).write_text(text)
    models = [os.environ.get("TARGET_MODEL", "/models/target"), os.environ.get("DRAFT_MODEL", "/models/draft")]
    options = {
        **dict(zip(("model", "draft-model"), models, strict=True)),
        "config": place / "specq.toml",
        "api-keys": place / "api-keys.toml",
        "bind": f"tcp://0.0.0.0:{PORT}",
        "hosts": os.environ["HOSTS"],
        "journal": os.environ.get("JOURNAL", "none"),
    }
    command = [
        sys.executable,
        "-m",
        "specq",
        "up",
        "--serve",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    return subprocess.Popen(command)
