"""The matrix products of the C kernels, alone: for this machine, for narrower vectors, and for arm64 under an
emulator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from specq.engines.native.compiler import SOURCE
from specq.runtime.compiler import FLAGS

PROGRAM = Path(__file__).parent / "products.c"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
COMMON = [flag for flag in FLAGS if flag not in ("-march=native", "-shared", "-fPIC", "-lm")]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def outputs(directory: Path, compiler: str, *flags: str, under: tuple[str, ...] = ()) -> str:
    """Return what the program prints, built like this."""
    path = directory / "products"
    command = [compiler, str(PROGRAM), "-I", str(SOURCE.parent), "-o", str(path), *COMMON, *flags, "-lm"]
    subprocess.run(command, check=True, timeout=120)
    return subprocess.run([*under, str(path)], check=True, timeout=120, capture_output=True, text=True).stdout


def num_wrong(printed: str) -> list[int]:
    return [int(count) for count in re.findall(r"(\d+) wrong", printed)]


@pytest.mark.slow
def test_products_have_the_bits_of_sums_in_order(tmp_path):
    assert num_wrong(outputs(tmp_path, "cc", "-march=native")) == [0] * 4


@pytest.mark.slow
def test_narrower_vectors_give_the_same_bits(tmp_path):
    """A machine with AVX-512 runs the kernels of one with AVX2."""
    if "avx2" not in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""):
        pytest.skip("not run: this processor has no AVX2")
    expected = outputs(tmp_path, "cc", "-march=native")
    assert expected == outputs(tmp_path, "cc", "-march=x86-64-v3")


@pytest.mark.slow
def test_arm64_gives_the_same_bits(tmp_path):
    missing = [tool for tool in (ARM_COMPILER, ARM_EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not run: {' and '.join(missing)} missing (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    expected = outputs(tmp_path, "cc", "-march=native")
    printed = outputs(tmp_path, ARM_COMPILER, "-static", under=(ARM_EMULATOR,))
    assert num_wrong(printed) == [0] * 4
    assert expected == printed
