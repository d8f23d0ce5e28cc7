"""The example plugin as pip would install it: on sys.path, with a dist-info directory that says what it registers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.verification import STRATEGIES, strategy

PLUGIN = Path(__file__).parent / "example_plugin"
TABLES = (ENGINES, DRAFTERS, STRATEGIES)


def install(directory: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write the dist-info directory of a package that has these entry points."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")


def _forget() -> None:
    strategy.cache_clear()
    for table in TABLES:
        table.__dict__.pop("third_party", None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path, of this process and of those that it starts, in which packages can be installed."""
    directory = tmp_path / "site"
    directory.mkdir()
    for path in (directory, PLUGIN):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{PLUGIN}")
    _forget()
    yield directory
    _forget()


@pytest.fixture
def plugin(site: Path) -> Path:
    """The example plugin, installed."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    install(site, "example_plugin", project["entry-points"])
    return site
