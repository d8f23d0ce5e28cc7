"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMAND = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def make_certificate(folder: Path, name: str, host: str) -> tuple[Path, Path]:
    """Write a certificate that vouches for itself, and its key. `host`: IP:... or DNS:..."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subject = ("-subj", "/CN=specq", "-addext", f"subjectAltName={host}")
    subprocess.run([*COMMAND, "-keyout", key, "-out", certificate, *subject], check=True, capture_output=True)
    return certificate, key
