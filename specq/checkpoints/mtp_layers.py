"""Layers of a checkpoint that predict several tokens (MTP): tensors that the model itself does not read.

They have one of three published layouts. The beginning of their names distinguishes them:

- `model.layers.N.`, where N is the number of the model's layers: DeepSeek-V3's, if one of them is `eh_proj`.
- `mtp.`: Qwen3-Next's.
- `model.mtp_layers.0.`: MiMo's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from specq.checkpoints.files import read_json
from specq.checkpoints.gguf_file import is_gguf

QWEN, MIMO, DEEPSEEK = LAYOUTS = ("mtp.", "model.mtp_layers.", "model.layers.")
_MOST_HEADER = 100 << 20  # bytes
_NUMBER = "[0-9]{1,9}"


class StoredTensor(NamedTuple):
    """Where a tensor is stored: its file, the format of its numbers, its shape, and its first and last byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]

    def read(self) -> bytes:
        """Return its bytes."""
        with self.path.open("rb") as file:
            file.seek(self.span[0])
            return file.read(self.span[1] - self.span[0])


def mtp_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all MTP layers by name: {} if there are none, or if a file cannot be read.

    If there are several layouts, only the first of `LAYOUTS` counts.
    """
    found: dict[str, dict[str, StoredTensor]] = {layout: {} for layout in LAYOUTS}
    num_layers = read_json(checkpoint, "config.json").get("num_hidden_layers")
    if is_gguf(checkpoint) or type(num_layers) is not int:
        return {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in safetensors_header(path).items():
            if mtp_number(name, num_layers) is not None:
                found[next(layout for layout in LAYOUTS if name.startswith(layout))][name] = tensor
    if not any(".eh_proj." in name for name in found[DEEPSEEK]):
        found[DEEPSEEK] = {}  # layers that nobody reads, as in a model that was cut
    return next((tensors for tensors in found.values() if tensors), {})


def mtp_number(name: str, num_layers: int) -> int | None:
    """Return which of a model's MTP layers a tensor belongs to, from 0; None if it is another tensor."""
    if name.startswith(QWEN):
        numbered = re.match(rf"mtp\.layers\.({_NUMBER})\.", name)
        return int(numbered[1]) if numbered else 0
    for prefix, first in ((MIMO, 0), (DEEPSEEK, num_layers)):
        numbered = re.match(rf"{re.escape(prefix)}({_NUMBER})\.", name)
        if numbered and int(numbered[1]) >= first:
            return int(numbered[1]) - first
    return None


def safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file; {} if it is damaged, which those who load it report."""
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        with path.open("rb") as file:
            size, most = int.from_bytes(file.read(8), "little"), path.stat().st_size
            said: dict[str, Any] = json.loads(file.read(size)) if size <= _MOST_HEADER else {}
        found = {
            name: StoredTensor(
                path,
                str(one["dtype"]),
                tuple(one["shape"]),
                (8 + size + one["data_offsets"][0], 8 + size + one["data_offsets"][1]),
            )
            for name, one in said.items()
            if name != "__metadata__"
        }
        is_whole = all(8 + size <= one.span[0] <= one.span[1] <= most for one in found.values())
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return {}
    return found if is_whole else {}
