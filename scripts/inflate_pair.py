"""Make checkpoints of any larger shape that compute what a small Llama computes, at the larger shape's full cost.

    python scripts/inflate_pair.py --out pair                                  # target: Qwen2.5-7B's shape, draft: 0.5B's
    python scripts/inflate_pair.py --out pair --target cpu-target --draft cpu-draft
    python scripts/inflate_pair.py --out pair --draft-shape layers=12,intermediate=2432      # half of that draft

So an engine can be measured at real sizes with the real acceptance of the bundled pair, where no large weights are to be
had. Any engine loads the result as an ordinary checkpoint. How the outputs stay those of the small model:

- The residual stream is padded with zeros; norm weights are scaled by sqrt(d/D) and eps by d/D for the wider mean.
- Rotary pair i of head size e becomes pair i * E/e of head size E, which has its frequency; sqrt(E/e) goes into q.
- Extra heads and feed-forward columns have random input weights and zero output weights, and so have extra layers.
- Extra rows of the vocabulary copy the row of the padding token, which is never produced: its logit is far below the
  others, where a row of zeros would have logit 0 and take mass at T > 0.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specq.models import resolve_model

FILL = 0.02  # standard deviation of the weights that do not matter
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; `qkv_bias` makes it a Qwen2, else it is a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.qkv_bias and self.head_dim * self.heads != self.hidden:
            raise click.BadParameter(f"a Qwen2 has heads * head_dim = hidden; not so {self}")


PRESETS = {
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 128, 18944, 152064, tied=False, qkv_bias=True),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
    # On one core of two: 20 ms and 2 ms a step with the compiled forward; widths of 4 times tiny's, so nothing is rounded.
    "cpu-target": Shape(1024, 18, 16, 4, 64, 2816, 4096),
    "cpu-draft": Shape(768, 2, 12, 4, 64, 1024, 4096),
}


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
    """Return the configuration of a small Llama's inflation; BadParameter if it does not fit into the shape."""
    _check_fits(shape_of(config), shape)
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


def _check_fits(small: Shape, large: Shape) -> None:
    for field in fields(Shape):
        have, want = getattr(small, field.name), getattr(large, field.name)
        if want < have and field.name not in ("tied", "qkv_bias"):
            raise click.BadParameter(f"{field.name}={want} is less than the small model's {have}")
    if large.head_dim % small.head_dim or large.heads % large.kv_heads:
        raise click.BadParameter(f"head_dim must be a multiple of {small.head_dim}, and heads one of kv_heads: {large}")
    if large.hidden % large.heads:
        raise click.BadParameter(f"hidden must be a multiple of heads: {large}")
    if large.heads // large.kv_heads < small.heads // small.kv_heads:
        raise click.BadParameter(f"a key-value head needs at least {small.heads // small.kv_heads} heads: {large}")
    if small.qkv_bias or (large.tied and not small.tied):
        raise click.BadParameter("the small model must be a Llama without biases, tied if the large one is")


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
        shape, small = self._shape, self._small
        hidden, inner = range(small.hidden), range(small.intermediate)
        queries, keys, values = (self._head_rows(part) for part in ("q", "k", "v"))
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self._norm(prefix + name, real=real)
        sizes = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
        sizes["v"] = sizes["k"]
        for part, rows in (("q", queries), ("k", keys), ("v", values)):
            name = f"self_attn.{part}_proj."
            matrix = self._filled(sizes[part], shape.hidden)
            if part == "k":  # what a used head's unused pairs say must not count
                matrix[: small.kv_heads * shape.head_dim] = 0
            scale = (shape.head_dim / small.head_dim) ** 0.5 if part == "q" else 1.0
            yield name + "weight", self._place(matrix, prefix + name + "weight", rows, hidden, scale, real=real)
            if shape.qkv_bias:
                yield name + "bias", torch.zeros(sizes[part], dtype=self._dtype, device=self._device)
        outputs = self._head_rows("o")
        zeros = torch.zeros(shape.hidden, sizes["q"], dtype=self._dtype, device=self._device)
        name = "self_attn.o_proj.weight"
        yield name, self._place(zeros, prefix + name, hidden, outputs, real=real)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            matrix = self._filled(shape.intermediate, shape.hidden)
            yield name, self._place(matrix, prefix + name, inner, hidden, real=real)
        zeros = torch.zeros(shape.hidden, shape.intermediate, dtype=self._dtype, device=self._device)
        name = "mlp.down_proj.weight"
        yield name, self._place(zeros, prefix + name, hidden, inner, real=real)

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

    def _filled(self, *sizes: int) -> torch.Tensor:
        matrix = torch.empty(sizes, dtype=self._dtype, device=self._device)
        return matrix.normal_(0, FILL, generator=self._random)


def inflate(source: str | Path, shape: Shape, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the inflation of a checkpoint directory as a transformers model on the device, without touching the disk."""
    config = AutoConfig.from_pretrained(source)
    large = inflated_config(config, shape, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(large, dtype=dtype)
    weights = load_file(Path(source) / "model.safetensors")
    model.load_state_dict(dict(Inflater(weights, config, shape, device, dtype).tensors()), assign=True, strict=False)
    model.tie_weights()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(large)  # its buffers are in no state dict
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not missing, missing
    return model.train(mode=False)


def write(source: str | Path, out: Path, shape: Shape, *, device: str = "cpu", dtype: torch.dtype) -> None:
    """Write the inflation of a checkpoint directory, a file for each layer, with its tokenizer and index."""
    config = AutoConfig.from_pretrained(source)
    large = inflated_config(config, shape, dtype)
    out.mkdir(parents=True, exist_ok=True)
    large.architectures = ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"]
    large.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copy(Path(source) / name, out / name)
    weights = load_file(Path(source) / "model.safetensors")
    files: dict[str, str] = {}
    total = 0
    for file, tensors in _by_file(Inflater(weights, config, shape, device, dtype).tensors()):
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        files |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
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


def greedy_difference(
    small: Callable[[list[int]], torch.Tensor],
    large: Callable[[list[int]], torch.Tensor],
    prompt: list[int],
    count: int,
) -> tuple[int, float] | None:
    """Follow the small model's greedy text; return (token, gap of its two best logits) of the first disagreement.

    small, large: token ids -> logits [vocab] of what follows. None: no disagreement in `count` tokens.
    """
    text = list(prompt)
    for index in range(count):
        logits = small(text).float()
        best = logits.topk(2)
        token = int(best.indices[0])
        if int(large(text).argmax()) != token:
            return index, float(best.values[0] - best.values[1])
        text.append(token)
    return None


def _parse_shape(preset: str, changes: str) -> Shape:
    if preset not in PRESETS:
        raise click.BadParameter(f"unknown shape {preset!r}; known are {', '.join(PRESETS)}")
    known = asdict(PRESETS[preset])
    try:
        pairs = [(key.strip(), int(value)) for key, value in (part.split("=") for part in changes.split(",") if part)]
    except ValueError as error:
        raise click.BadParameter(f"{changes!r} is not of the form hidden=1024,layers=30") from error
    unknown = [key for key, _ in pairs if key not in known]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is no size of a shape; known are {', '.join(known)}")
    changed = {key: bool(value) if isinstance(known[key], bool) else value for key, value in pairs}
    return replace(PRESETS[preset], **changed)


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Gets target/ and draft/.")
@click.option("--model", default="tiny", help="The small pair.")
@click.option("--target", default="qwen2.5-7b", help=f"Shape: {', '.join(PRESETS)}.")
@click.option("--draft", default="qwen2.5-0.5b", help="Likewise.")
@click.option("--target-shape", default="", help="Changes to it, such as hidden=1024,layers=30.")
@click.option("--draft-shape", default="", help="Likewise.")
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="Where tensors are made.")
@click.option("--only", type=click.Choice(["target", "draft"]), help="Make only one of the two.")
def main(out: Path, model: str, dtype: str, device: str, only: str | None, **shapes: str) -> None:
    """Write an inflated pair."""
    for role in ("target", "draft"):
        shape = _parse_shape(shapes[role], shapes[f"{role}_shape"])
        if only in (None, role):
            started = time.perf_counter()
            write(resolve_model(model, role), out / role, shape, device=device, dtype=DTYPES[dtype])
            click.echo(f"{out / role}: {shape} in {time.perf_counter() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
