"""`make demo` runs through, and shows what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "import runpy; runpy.run_path('scripts/demo.py', run_name='__main__')"  # finds specq without its installation


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo():
    """Drafts are accepted and corrected, and without drafters the texts are the same."""
    demo = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )

    assert demo.returncode == 0, demo.stderr
    assert "checked drafts accepted" in demo.stdout
    assert "«" in demo.stdout, "the target's own tokens are marked"
    assert "the same texts" in demo.stdout
    assert "times plain decoding" in demo.stdout
