"""`specq ray` where it cannot run: one line that says what would be right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specq.cli import main


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for module in ("actors", "controller", "deployment"):
        monkeypatch.delitem(sys.modules, f"specq.ray.{module}", raising=False)
    (tmp_path / "c.toml").write_text("")
    found = CliRunner().invoke(main, ["ray", "up", str(tmp_path / "c.toml")])
    assert found.exit_code == 2
    assert "this needs ray, which is not installed" in found.output
    assert ".[ray]" in found.output


@pytest.mark.parametrize(
    ("text", "said"),
    [("[ray]\nbrokers = 0\n", "ray.brokers is 0, but must be from 1 to 64"), ("[rey]\n", "unknown section rey")],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str):
    path = tmp_path / "c.toml"
    path.write_text(text)
    found = CliRunner().invoke(main, ["ray", "up", str(path)])
    assert found.exit_code == 2
    assert f"specq: {path}: {said}" in found.output
