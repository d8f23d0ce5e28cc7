"""Kernels of judging, compiled by another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq.verification import ahead
from specq.verification.cuda_rows import KERNELS

PATIENCE_S = 120


def test_without_triton_no_async_judging_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "find_spec", lambda name: None)
    assert ahead.begin(4096, "bfloat16", 90) is None


def test_all_kernels_of_judging_are_compiled_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiling = ahead.begin(1000, "bfloat16", 90)
    assert compiling is not None
    assert compiling.wait(PATIENCE_S) == 0
    compiled = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert compiled == {f"{name}_kernel" for name in KERNELS}
