"""A checkpoint with weights of four bits, as `compressed-tensors` packs them (w4a16), made of one with whole weights.

Rule: each linear layer of the decoder is rounded to the nearest of 15 values, symmetric about zero, with a scale for each group of GROUP inputs of
each output; embeddings, norms, biases and the head stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP, BITS = 128, 4
HIGHEST = (1 << BITS - 1) - 1
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
}


def quantise(source: Path, directory: Path) -> None:
    """Write to `directory` what `source`, a checkpoint directory, has, its linear layers with four bits."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: one for file in sorted(source.glob("*.safetensors")) for name, one in load_file(file).items()}
    linear = [name for name, one in tensors.items() if name.startswith("model.layers.") and one.dim() == 2]
    group = GROUP if all(tensors[name].shape[1] % GROUP == 0 for name in linear) else 0
    for name in linear:
        tensors |= pack(name.removesuffix(".weight"), tensors.pop(name), group)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = SCHEME | {"config_groups": {"group_0": _group(group)}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def pack(name: str, weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear layer of this name, of its weight [outputs, inputs]; group 0: a scale for each output."""
    outputs, inputs = weight.shape
    parts = weight.float().reshape(outputs, -1, group or inputs)  # [outputs, groups, inputs of one]
    scales = parts.abs().amax(2).clamp(min=1e-8) / HIGHEST
    values = (parts / scales[..., None]).round().clamp(-HIGHEST, HIGHEST).to(torch.int64).reshape(outputs, inputs)
    shifts = torch.arange(0, 32, BITS)
    words = ((values + HIGHEST + 1).reshape(outputs, -1, len(shifts)) << shifts).sum(
        2
    )  # the first input in the lowest bits
    return {
        f"{name}.weight_packed": words.to(torch.uint32).view(torch.int32).contiguous(),
        f"{name}.weight_scale": scales.to(weight.dtype),
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }


def _group(size: int) -> dict[str, object]:
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
