"""Checkpoints of any larger shape that compute what a small Llama computes, at the larger shape's full cost.

An engine can so be measured at real sizes with the real acceptance of the bundled pair, where no large weights are
available. Any engine loads the result as an ordinary checkpoint. `specq models inflate` writes such checkpoints, `inflate`
makes the model in memory. The outputs stay those of the small model because of this:

- The residual stream is padded with zeros; norm weights are scaled by sqrt(d/D) and eps by d/D for the wider mean.
- Rotary pair i of head size e becomes pair i * E/e of head size E, which has its frequency; sqrt(E/e) goes into q.
- Extra heads and feed-forward columns have random input weights and zero output weights, and so have extra layers.
- Extra rows of the vocabulary copy the row of the padding token, which is never produced: its logit is far below the
  others, where a row of zeros would have logit 0 and take mass at T > 0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specq.models.shapes import Shape, check_fits

FILL = 0.02  # standard deviation of the weights that do not matter
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def shape_of(config: Any) -> Shape:
    """Return the shape of a Llama-like checkpoint."""
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
    )


def inflated_config(config: Any, shape: Shape, dtype: torch.dtype) -> Any:
    """Return the configuration of a small Llama's inflation; ConfigError if it does not fit into the shape."""
    check_fits(shape_of(config), shape)
    settings = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden,
        "dtype": str(dtype).removeprefix("torch."),
    }
    same = ("max_position_embeddings", "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id")
    settings |= {name: getattr(config, name) for name in same}
    if shape.qkv_bias:
        return AutoConfig.for_model("qwen2", **settings, use_sliding_window=False)
    return AutoConfig.for_model("llama", **settings, head_dim=shape.head_dim)


class Inflater:
    """Makes one large tensor after another from a small model's weights (named as in its checkpoint)."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: Any, shape: Shape, device: str, dtype: torch.dtype
    ) -> None:
        self._weights, self._shape, self._small, self._dtype = weights, shape, shape_of(config), dtype
        self._device = torch.device(device)
        self._random = torch.Generator(self._device).manual_seed(0)
        self._pad_token = config.pad_token_id if config.pad_token_id is not None else 0
        self._norm_scale = (self._small.hidden / shape.hidden) ** 0.5

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the large checkpoint, on the device."""
        yield "model.embed_tokens.weight", self._vocabulary("model.embed_tokens.weight", fill=False)
        for layer in range(self._shape.layers):
            prefix = f"model.layers.{layer}."
            for name, tensor in self._layer(prefix, real=layer < self._small.layers):
                yield prefix + name, tensor
        yield "model.norm.weight", self._norm("model.norm.weight", real=True)
        if not self._shape.tied:
            name = "model.embed_tokens.weight" if self._small.tied else "lm_head.weight"
            yield "lm_head.weight", self._vocabulary(name, fill=True)

    def _layer(self, prefix: str, *, real: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name within the layer, tensor); an extra layer (not `real`) adds nothing to the residual stream."""
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self._norm(prefix + name, real=real)
        yield from self._inputs_of_attention(prefix, real=real)
        shape, hidden, inner = self._shape, range(self._small.hidden), range(self._small.intermediate)
        name = "self_attn.o_proj.weight"
        zeros = self._zeros(shape.hidden, shape.heads * shape.head_dim)
        yield name, self._place(zeros, prefix + name, hidden, self._head_rows("o"), real=real)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            matrix = self._filled(shape.intermediate, shape.hidden)
            yield name, self._place(matrix, prefix + name, inner, hidden, real=real)
        name = "mlp.down_proj.weight"
        zeros = self._zeros(shape.hidden, shape.intermediate)
        yield name, self._place(zeros, prefix + name, hidden, inner, real=real)

    def _inputs_of_attention(self, prefix: str, *, real: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the projections to queries, keys and values."""
        shape, small = self._shape, self._small
        for part, num_heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            name = f"self_attn.{part}_proj."
            matrix = self._filled(num_heads * shape.head_dim, shape.hidden)
            if part == "k":  # the unused rotary pairs of a used head must not count
                matrix[: small.kv_heads * shape.head_dim] = 0
            scale = (shape.head_dim / small.head_dim) ** 0.5 if part == "q" else 1.0
            rows, columns = self._head_rows(part), range(small.hidden)
            yield name + "weight", self._place(matrix, prefix + name + "weight", rows, columns, scale, real=real)
            if shape.qkv_bias:
                yield name + "bias", self._zeros(num_heads * shape.head_dim)

    def _head_rows(self, part: str) -> list[int]:
        """Return where the small model's rows of q, k or v (for o: columns) lie in the large one's."""
        small, large = self._small, self._shape
        is_query, is_rotary = part in "qo", part in "qk"
        group = small.heads // small.kv_heads if is_query else 1
        large_group = large.heads // large.kv_heads if is_query else 1
        half, step = small.head_dim // 2, large.head_dim // small.head_dim
        rotary = [i * step for i in range(half)] + [large.head_dim // 2 + i * step for i in range(half)]
        dims = rotary if is_rotary else range(small.head_dim)
        heads = (kv * large_group + i for kv in range(small.kv_heads) for i in range(group))
        return [head * large.head_dim + dim for head in heads for dim in dims]

    def _place(
        self,
        matrix: torch.Tensor,
        name: str,
        rows: range | list[int],
        columns: range | list[int],
        scale: float = 1.0,
        *,
        real: bool,
    ) -> torch.Tensor:
        """Write a small matrix into some rows and columns of a large one; nothing for an extra layer."""
        if real:
            index = torch.tensor(list(rows), device=self._device), torch.tensor(list(columns), device=self._device)
            matrix[index[0][:, None], index[1]] = self._small_weight(name, scale)
        return matrix

    def _norm(self, name: str, *, real: bool) -> torch.Tensor:
        weight = torch.ones(self._shape.hidden, dtype=self._dtype, device=self._device)
        if real:
            weight[: self._small.hidden] = self._small_weight(name, self._norm_scale)
        return weight

    def _vocabulary(self, name: str, *, fill: bool) -> torch.Tensor:
        shape, small = self._shape, self._small
        rows = self._filled(shape.vocab, shape.hidden)
        if not fill:
            rows[:, small.hidden :] = 0
        rows[: small.vocab, : small.hidden] = self._small_weight(name)
        rows[small.vocab :, : small.hidden] = rows[self._pad_token, : small.hidden].clone()
        return rows

    def _small_weight(self, name: str, scale: float = 1.0) -> torch.Tensor:
        return (self._weights[name].to(self._device).float() * scale).to(self._dtype)

    def _zeros(self, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=self._dtype, device=self._device)

    def _filled(self, *sizes: int) -> torch.Tensor:
        matrix = torch.empty(sizes, dtype=self._dtype, device=self._device)
        return matrix.normal_(0, FILL, generator=self._random)


def inflate(source: str | Path, shape: Shape, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the inflation of a checkpoint directory as a transformers model on the device, without touching the disk."""
    config = AutoConfig.from_pretrained(source)
    large = inflated_config(config, shape, dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(large, dtype=dtype)  # type: ignore[no-untyped-call]
    weights = load_file(Path(source) / "model.safetensors")
    model.load_state_dict(dict(Inflater(weights, config, shape, device, dtype).tensors()), assign=True, strict=False)
    model.tie_weights()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(large)  # its buffers are in no state dict
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not missing, missing
    return model.train(mode=False)


def write(source: str | Path, out: Path, shape: Shape, *, device: str = "", dtype: str = "bfloat16") -> None:
    """Write the inflation of a checkpoint directory, a file for each layer, with its tokenizer and index.

    `device` is where the tensors are made, "" a GPU if there is one; `dtype` is one of `DTYPES`.
    """
    kind = DTYPES[dtype]
    config = AutoConfig.from_pretrained(source)
    large = inflated_config(config, shape, kind)
    out.mkdir(parents=True, exist_ok=True)
    large.architectures = ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"]
    large.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copy(Path(source) / name, out / name)
    weights = load_file(Path(source) / "model.safetensors")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _write_tensors(Inflater(weights, config, shape, place, kind).tensors(), out)


def _write_tensors(tensors: Iterator[tuple[str, torch.Tensor]], out: Path) -> None:
    files: dict[str, str] = {}
    total = 0
    for file, members in _by_file(tensors):
        save_file({name: tensor.cpu() for name, tensor in members.items()}, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        files |= dict.fromkeys(members, file)
        total += sum(tensor.nbytes for tensor in members.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _by_file(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Gather consecutive tensors of one layer."""
    gathered: dict[str, torch.Tensor] = {}
    current = ""
    for name, tensor in tensors:
        parts = name.split(".")
        file = f"model-{'-'.join(parts[1:3]) if parts[1] == 'layers' else parts[-2]}.safetensors"
        if file != current and gathered:
            yield current, gathered
            gathered = {}
        current = file
        gathered[name] = tensor
    yield current, gathered
