"""A configuration file of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "deployment.toml"
        path.write_text(text)
        return path

    return write
