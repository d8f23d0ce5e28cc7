"""Kernels are built once, ahead of their use if asked, whoever asks for them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from specq.runtime import compiler

CC = compiler.find_compiler()
pytestmark = pytest.mark.skipif(not CC, reason="no C compiler")


@pytest.fixture
def sources(monkeypatch, tmp_path) -> list[Path]:
    """Two small libraries in place of specq's, an empty cache, and a compiler that lists what it compiles."""
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    places = [tmp_path / name / "kernels" / f"{name}.c" for name in ("one", "two")]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text(f"int number(void) {{ return {len(place.stem)}; }}\n")
    listing = tmp_path / "cc"
    listing.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$1" >> {tmp_path}/compiled\nexec {CC} "$@"\n')
    listing.chmod(0o700)
    monkeypatch.setattr(shutil, "which", lambda _name: str(listing))
    monkeypatch.setattr(compiler, "kernel_sources", lambda: places)
    return places


def compiled(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "compiled").read_text().splitlines())


def test_who_comes_while_a_library_is_built_waits_for_it(sources, tmp_path):
    """Each waits with a file of its own, as another process does."""
    start = Barrier(3)

    def build() -> Path:
        start.wait(timeout=60)
        return compiler.built(sources[0], str(tmp_path / "cc"))

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(build) for _ in range(3)]
        assert len({each.result(timeout=60) for each in asked}) == 1
    assert compiled(tmp_path) == [str(sources[0])]


def test_all_libraries_are_built_ahead_and_once(sources, tmp_path):
    compiler.build_ahead()
    found = [compiler.library_or_reason(source) for source in sources]
    assert [library.number() for library in found] == [3, 3]
    assert compiled(tmp_path) == [str(source) for source in sources]


def test_without_a_compiler_nothing_is_built_ahead(sources, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    compiler.build_ahead()
    assert not (tmp_path / "cache").exists()


def test_the_sources_are_those_of_all_packages():
    assert [source.stem for source in compiler.kernel_sources()] == ["suffix", "forward", "integer", "rows", "trees"]
