"""The time of a forward pass in integer arithmetic, by its number of rows, on a model of 1.43 billion random weights.

The shape is that of a Qwen2-like model, with the types of a Q4_K_M file. All rows are tokens of one text behind a
context, and all give logits. Rounds take turns with another program's, since machines are noisy and drift. That program
takes the file, "bench", and rows=1,2,...; it prints lines with "rows N: best MS".

    python bench/__main__.py bench.integer_passes [--threads 2] [--context 256] [--rounds 5] [--beside PROGRAM]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.random_gguf import Q, write_random
from specq.engines.native import INTEGER, NativeForward, PackedRows, RowPacker, Threads, integer_weights, kernels
from specq.protocol import ConfigError

SHAPE = {
    "hidden": 1536,
    "layers": 30,
    "heads": 12,
    "kv_heads": 4,
    "head_dim": 128,
    "intermediate": 8960,
    "vocab": 49152,
    "context": 4096,
}
ROWS = (1, 2, 4, 5, 8, 12, 16, 32)
ROUND_S = 0.4  # of each number of rows


def type_of(name: str) -> object:
    """Return the type of a matrix in llama.cpp's Q4_K_M: Q6_K for some layers' values and down projections."""
    if name == "token_embd.weight":
        return Q.Q6_K
    layer, own = int(name.split(".")[1]), name.split(".")[2]
    first = SHAPE["layers"] // 8
    has_more_bits = layer < first or layer >= 7 * SHAPE["layers"] // 8 or (layer - first) % 3 == 2
    return Q.Q6_K if has_more_bits and own in ("attn_v", "ffn_down") else Q.Q4_K


def load(path: Path, threads: int, num_slots: int) -> NativeForward:
    """Return the file's forward. Raises ConfigError without a C compiler."""
    library = kernels(INTEGER)
    if library is None:
        raise ConfigError("integer arithmetic needs a C compiler: install gcc or clang")
    weights, _ = integer_weights(path, library, num_slots)
    shape = SHAPE["layers"], SHAPE["kv_heads"], num_slots, SHAPE["head_dim"]
    keys, values = (np.zeros(shape, np.float32) for _ in range(2))
    return NativeForward(weights, keys, values, library, Threads(threads))


def text_rows(count: int, start: int) -> PackedRows:
    """Return tokens of one text from position `start` on, each with logits."""
    packer, table = RowPacker(), np.arange(start + count, dtype=np.int32)
    packer.add_session(table)
    for position in range(start, start + count):
        packer.add_chain([position % SHAPE["vocab"]], [position], position, judged=True)
    return packer.pack()


def least_ms(forward: NativeForward, rows: PackedRows) -> float:
    """Return the least time of the passes of one round."""
    least, until = float("inf"), time.perf_counter() + ROUND_S
    while (began := time.perf_counter()) < until:
        forward(rows)
        least = min(least, 1e3 * (time.perf_counter() - began))
    return least


def of_other(program: str, path: Path, threads: int) -> Iterator[tuple[int, float]]:
    """Run the other program once; yield its (rows, ms)."""
    command = [program, str(path), "bench", f"rows={','.join(map(str, ROWS))}", f"sec={ROUND_S}", f"nt={threads}"]
    printed = subprocess.run([*command, f"cache={path}.other"], check=True, capture_output=True, text=True).stdout
    for count, ms in re.findall(r"rows +(\d+): best +([\d.]+)", printed):
        yield int(count), float(ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("threads", 2), ("context", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--beside", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = write_random(Path(directory) / "model.gguf", type_of, shape=SHAPE)
        forward = load(path, asked.threads, asked.context + max(ROWS))
        forward(text_rows(asked.context, 0))
        ours, theirs = (dict.fromkeys(ROWS, float("inf")) for _ in range(2))
        for _ in range(asked.rounds):
            for count in ROWS:
                ours[count] = min(ours[count], least_ms(forward, text_rows(count, asked.context)))
            for count, ms in of_other(asked.beside, path, asked.threads) if asked.beside else ():
                theirs[count] = min(theirs[count], ms)
    lines = ["rows      ms  beside   ratio" if asked.beside else "rows      ms"]
    for count in ROWS:
        more = f" {theirs[count]:7.1f} {ours[count] / theirs[count]:7.2f}" if asked.beside else ""
        lines.append(f"{count:4} {ours[count]:7.1f}{more}")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
