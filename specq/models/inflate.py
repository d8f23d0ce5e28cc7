"""Make checkpoints of a larger shape that compute the same as a small Llama, at the larger one's cost.

So an engine can be measured at real sizes with small models' real acceptance. No large weights are needed. Any engine
loads the result as an ordinary checkpoint. `specq models inflate` writes such checkpoints, `inflate` makes the model in
memory. `specq.models.inflate_heads` does the same for heads. These rules keep the outputs of the small model:

- The residual stream is padded with zeros. Norm weights are scaled by sqrt(d/D) and eps by d/D for the wider mean.
- Rotary pair i of head size e becomes pair i * E/e of head size E, with the same frequency. q is scaled by sqrt(E/e).
- Extra heads, feed-forward columns and layers have random input weights and zero output weights.
- Extra rows of the vocabulary copy the row of the padding token. If none is named, they copy the least likely token
  after random text. Its logit is far below the others. A row of zeros would have logit 0 and take probability mass at T
  > 0. A head over some tokens (`specq.checkpoints.draft_form`) gets a row for each token in the same way.

The small model may be a Llama in Hugging Face layout, a GGUF file, or a draft model of ours. A parallel draft model
stays one. Its masks are the last rows of the larger vocabulary, and config.json has `num_places`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specq.checkpoints import read_text
from specq.engines.torch import load_network
from specq.models.inflate_layers import Named, Placer, Tensors
from specq.models.shapes import Shape, check_fits

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)
PROBES = (16, 32)  # random texts, and tokens of each


@dataclass(frozen=True, eq=False)
class Small:
    """A small model in float32.

    - shape: its sizes; its vocabulary includes the masks.
    - token_ids: i64[rows of lm_head], the tokens of the rows.
    - rare: the row of `lm_head` that extra rows copy.
    - num_masks: how many of the embedding's last rows are masks.
    """

    config: Any
    shape: Shape
    weights: Tensors
    token_ids: torch.Tensor
    rare: int
    num_masks: int


def load_small(source: str | Path) -> Small:
    """Read a small model. Raises ConfigError if it cannot be loaded."""
    network = load_network(Path(source), torch.device("cpu"), "float32")
    num_masks = getattr(network, "num_masks", 0)
    head = network.get_output_embeddings()
    found = getattr(head, "token_ids", None)
    token_ids = torch.arange(len(head.weight)) if found is None else torch.from_numpy(found).long()
    shape = shape_of(network.config)
    return Small(network.config, shape, network.state_dict(), token_ids, _rare_row(network, token_ids), num_masks)


def _rare_row(network: Any, token_ids: torch.Tensor) -> int:
    """Return the row of the padding token, or of the least likely token after random texts."""
    if network.config.pad_token_id is not None:
        return int((token_ids == network.config.pad_token_id).nonzero()[0])
    texts = torch.randint(0, network.config.vocab_size, PROBES, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        log_probs = network(texts).logits.log_softmax(-1)
    return int(log_probs.flatten(0, 1).amax(0).argmin())


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


def inflated_config(small: Small, shape: Shape, dtype: torch.dtype) -> Any:
    """Return the configuration of a small model's inflation. Raises ConfigError if it does not fit into the shape."""
    check_fits(small.shape, shape)
    config = small.config
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
    if small.num_masks:
        settings["num_places"] = small.num_masks + 1
    if shape.qkv_bias:
        return AutoConfig.for_model("qwen2", **settings, use_sliding_window=False)
    return AutoConfig.for_model("llama", **settings, head_dim=shape.head_dim)


class Inflater(Placer):
    """Makes the large tensors one after another from a small model's weights."""

    def __init__(self, small: Small, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__(small.weights, small.shape, shape, device, dtype)
        self._model = small

    def tensors(self) -> Named:
        """Yield (name, tensor) of the large checkpoint, on the device."""
        yield "model.embed_tokens.weight", self._embedding()
        for layer in range(self.large.layers):
            prefix = f"model.layers.{layer}."
            for name, tensor in self.layer(prefix, real=layer < self.small.layers):
                yield prefix + name, tensor
        yield "model.norm.weight", self.norm("model.norm.weight")
        if not self.large.tied:
            yield "lm_head.weight", self._head()

    def _embedding(self) -> torch.Tensor:
        """Return the rows of all tokens, then those of the masks."""
        rows, width, num_masks = (
            self.zeros(self.large.vocab, self.large.hidden),
            self.small.hidden,
            self._model.num_masks,
        )
        values = self.small_weight("model.embed_tokens.weight")
        rows[:, :width] = values[self._model.token_ids[self._model.rare]]
        rows[: len(values) - num_masks, :width] = values[: len(values) - num_masks]
        rows[len(rows) - num_masks :, :width] = values[len(values) - num_masks :]
        return rows

    def _head(self) -> torch.Tensor:
        rows, width = self.filled(self.large.vocab, self.large.hidden), self.small.hidden
        values = self.small_weight("model.embed_tokens.weight" if self.small.tied else "lm_head.weight")
        rows[:, :width] = values[self._model.rare]
        rows[self._model.token_ids.to(self.device), :width] = values
        return rows


def inflate(source: str | Path, shape: Shape, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the inflation of a checkpoint as a transformers model on the device, without writing to disk."""
    small = load_small(source)
    large = inflated_config(small, shape, dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(large, dtype=dtype)  # type: ignore[no-untyped-call]
    model.load_state_dict(dict(Inflater(small, shape, device, dtype).tensors()), assign=True, strict=False)
    model.tie_weights()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(large)  # no state dict has its buffers
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not missing, missing
    return model.train(mode=False)


def write(
    source: str | Path,
    out: Path,
    shape: Shape,
    *,
    device: str = "",
    dtype: str = "bfloat16",
    tokenizer: str | Path = "",
) -> None:
    """Write the inflation of a checkpoint, one file per layer, with its tokenizer and index.

    `device` makes the tensors; "": a GPU if available. `dtype` is one of `DTYPES`. `tokenizer`: the model whose
    tokenizer is used if the source has none.
    """
    kind = DTYPES[dtype]
    small = load_small(source)
    large = inflated_config(small, shape, kind)
    out.mkdir(parents=True, exist_ok=True)
    large.architectures = ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"]
    large.save_pretrained(out)
    has_own = read_text(Path(source), "tokenizer.json") is not None
    _write_tokenizer(source if has_own or not tokenizer else tokenizer, out)
    _write_tensors(Inflater(small, shape, place_of(device), kind).tensors(), out)


def place_of(device: str) -> str:
    """Return the device that makes tensors; for "" a GPU if available."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _write_tokenizer(model: str | Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if (text := read_text(Path(model), name)) is not None:
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(text, "utf-8")


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
