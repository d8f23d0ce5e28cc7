"""Packages that specq does without until something needs them: the extras of its own that bring them.

To add one: a line in `EXTRAS`, and the extra in pyproject.toml.
"""

from __future__ import annotations

EXTRAS = {"torch": "torch", "transformers": "torch", "safetensors": "torch", "vllm": "vllm"}  # package -> extra


def how_to_install(package: str) -> str:
    """Return what is said where a package is not installed."""
    extra = EXTRAS.get(package)
    hint = f"; in a clone of specq: .venv/bin/pip install -e '.[{extra}]'" if extra else ""
    return f"this needs {package}, which is not installed{hint}"
