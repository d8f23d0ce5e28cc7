"""The two models: their shapes, their forward pass without a cache, and their files."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specq.drafting.head_layers import RmsNorm
from specq.training.corpus import MAX_POSITIONS, VOCAB_SIZE, save_tokenizer, stop_ids

ROPE_THETA = 10000.0
IGNORED = -100  # label of a position without loss

# The draft must stay below 3,000,000 bytes and the target below 20,000,000, in bfloat16.
SHAPES: dict[str, dict[str, int]] = {
    "target": dict(hidden_size=256, intermediate_size=688, num_hidden_layers=12, num_heads=4, num_kv_heads=2),
    "draft-1": dict(hidden_size=192, intermediate_size=1024, num_hidden_layers=1, num_heads=3, num_kv_heads=1),
    "draft-2": dict(hidden_size=192, intermediate_size=440, num_hidden_layers=2, num_heads=3, num_kv_heads=1),
}


def build_model(shape: str, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> LlamaForCausalLM:
    """Return a freshly initialised model of a shape of `SHAPES`, in float32."""
    sizes: dict[str, Any] = dict(SHAPES[shape])
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_attention_heads=sizes.pop("num_heads"),
        num_key_value_heads=sizes.pop("num_kv_heads"),
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=stop_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(shrink)
            layer.mlp.down_proj.weight.mul_(shrink)
    nn.Module.to(model, device)
    return model


def fuse_norms(model: nn.Module) -> None:
    """Compute each norm of a Llama or Qwen2 network in one kernel instead of transformers' seven.

    The results are equal except for rounding.
    """
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm"):
                setattr(module, name, _fused(norm))


def _fused(norm: Any) -> RmsNorm:
    fused = RmsNorm(len(norm.weight), eps=norm.variance_epsilon)
    fused.weight = norm.weight
    return fused


def hidden_states(model: LlamaForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Run the decoder causally over whole rows. [num_rows, length] -> [num_rows, length, hidden]."""
    return tapped_states(model, token_ids, ())[1]


def tapped_states(
    model: LlamaForCausalLM, token_ids: torch.Tensor, layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of some layers, beside each other [num_rows, length, layers * hidden], and `hidden_states`.

    This skips the mask of `LlamaModel.forward`, so that layers can use the fused causal kernel.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(token_ids)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    rotary = decoder.rotary_emb(hidden, positions)
    tapped = [hidden[..., :0]]
    for number, layer in enumerate(decoder.layers):
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        tapped += [hidden] if number in layers else []
    return torch.cat(tapped, -1), decoder.norm(hidden)


def next_token_labels(token_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Shift rows left by one and mask padding. [num_rows, length] -> [num_rows, length]."""
    labels = functional.pad(token_ids[:, 1:], (0, 1), value=pad_id)
    return labels.masked_fill(labels == pad_id, IGNORED)


def token_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy. hidden [num_rows, length, dim], head [vocab, dim], labels [num_rows, length]."""
    logits = functional.linear(hidden, head).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile each layer in place: equal layers share one compilation, so that twelve cost little more than one."""
    for layer in model.model.layers:
        layer.compile()


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bfloat16, its tokenizer and its generation settings in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict({name.replace("_orig_mod.", ""): weight for name, weight in model.state_dict().items()})
    rounded.tie_weights()
    stops = {"eos_token_id": stop_ids(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    rounded.generation_config = GenerationConfig(**stops, do_sample=False)  # type: ignore[no-untyped-call]
    nn.Module.to(rounded, torch.bfloat16)
    rounded.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    _add_older_names(folder / "config.json")


def _add_older_names(path: Path) -> None:
    """Repeat in config.json what transformers 4 and other engines expect under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(rope_theta=ROPE_THETA, torch_dtype="bfloat16")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """Read the rounded weights, for use without gradients: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    nn.Module.to(model, device)
    model.train(mode=False)
    model.requires_grad_(requires_grad=False)
    return model


def weight_bytes(folder: Path) -> int:
    """Return the size of the weights file."""
    return (folder / "model.safetensors").stat().st_size
