"""Batched decoding over a static key-value cache: one captured graph a step on a GPU, the same code on a CPU.

Prompts are padded on the left, so that all rows write the same cache slot in the same step. The next token is
argmax(logits + temperature * gumbel): temperature 0 is greedy, and temperature T samples softmax(logits / T) exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

WARM_UP_STEPS = 3
CHECK_EVERY = 16


@dataclass
class DecodingState:
    """All data that a step reads and writes in place."""

    token_ids: torch.Tensor  # [num_rows, capacity] int64, prompts right-aligned in front of the new tokens
    starts: torch.Tensor  # [num_rows] int64, first slot without padding
    temperatures: torch.Tensor  # [num_rows, 1]
    stops: torch.Tensor  # [num_stops] int64
    pad_id: int
    slot: torch.Tensor  # [1] int64, the slot whose token the next step reads
    done: torch.Tensor  # [num_rows] bool
    noise: torch.Tensor | None  # [num_rows, num_new, vocab], the Gumbel noise to use instead of fresh noise
    prompt_size: int
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Compute grouped-query attention without copying keys for each head of a group.

    queries        [rows, heads, width, dim].
    keys, values   [rows, kv_heads, slots, dim].
    visible        [rows, width, slots] bool.

    Returns [rows, width, heads * dim].
    """
    rows, heads, width, dim = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(rows, kv_heads, -1, dim)  # [rows, kv_heads, group * width, dim]
    scores = (grouped @ keys.mT * dim**-0.5).view(rows, kv_heads, heads // kv_heads, width, slots)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    mixed = weights.view(rows, kv_heads, -1, slots) @ values
    return mixed.view(rows, heads, width, dim).transpose(1, 2).flatten(2)


def run_layer(
    layer: LlamaDecoderLayer,
    hidden: torch.Tensor,  # [rows, width, hidden]
    rotary: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,  # [width]
    visible: torch.Tensor,  # [rows, width, slots]
) -> torch.Tensor:
    """Run one decoder layer, writing its new keys and values into the cache."""
    attention, num_visible = layer.self_attn, visible.shape[2]
    normed = layer.input_layernorm(hidden)
    queries, keys, values = (
        project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
    for store, new in zip(cache, (keys, values), strict=True):
        store.index_copy_(2, slots, new)
    stored_keys, stored_values = (store[:, :, :num_visible] for store in cache)
    hidden = hidden + attention.o_proj(attend(queries, stored_keys, stored_values, visible))
    output: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output


def run_slots(model: LlamaForCausalLM, state: DecodingState, slots: torch.Tensor, num_visible: int) -> torch.Tensor:
    """Run the tokens at `slots`; return the logits after the last of them, [num_rows, vocab] float32."""
    token_ids = state.token_ids.index_select(1, slots)
    positions = (slots[None] - state.starts[:, None]).clamp(min=0)
    every_slot = torch.arange(num_visible, device=slots.device)
    causal = every_slot[None, None] <= slots[None, :, None]
    # A padding slot sees itself, so that no row of scores is empty.
    visible = causal & (every_slot[None, None] >= state.starts[:, None, None].minimum(slots[None, :, None]))
    hidden = model.model.embed_tokens(token_ids)
    rotary = model.model.rotary_emb(hidden, positions)
    for layer, cache in zip(model.model.layers, state.caches, strict=True):
        hidden = run_layer(layer, hidden, rotary, cache, slots, visible)
    return functional.linear(model.model.norm(hidden[:, -1]), model.lm_head.weight).float()


def choose_tokens(state: DecodingState, logits: torch.Tensor) -> None:
    """Choose each row's next token, write it one slot later, and advance; finished rows get padding."""
    if state.noise is None:
        gumbel = -torch.empty_like(logits).exponential_().log()
    else:
        gumbel = state.noise.index_select(1, state.slot - (state.prompt_size - 1)).squeeze(1)
    chosen = (logits + state.temperatures * gumbel).argmax(-1)
    chosen = torch.where(state.done, state.pad_id, chosen)
    state.slot.add_(1)
    state.token_ids.index_copy_(1, state.slot, chosen[:, None])
    state.done.logical_or_(torch.isin(chosen, state.stops))


def step(model: LlamaForCausalLM, state: DecodingState) -> None:
    """Decode one token in every row."""
    choose_tokens(state, run_slots(model, state, state.slot, state.token_ids.shape[1]))


def new_state(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    temperatures: Sequence[float],
    stops: Sequence[int],
    pad_id: int,
    noise: torch.Tensor | None,
) -> DecodingState:
    """Place the prompts on the model's device and allocate the cache."""
    device, config = model.device, model.config
    prompt_size = max(map(len, prompts))
    token_ids = torch.full((len(prompts), prompt_size + num_new), pad_id)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[prompt_size - len(prompt) : prompt_size] = torch.tensor(prompt)
    sizes: Any = len(prompts), config.num_key_value_heads, token_ids.shape[1], config.head_dim
    empty = torch.zeros(sizes, dtype=model.dtype, device=device)
    return DecodingState(
        token_ids=token_ids.to(device),
        starts=torch.tensor([prompt_size - len(prompt) for prompt in prompts], device=device),
        temperatures=torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None],
        stops=torch.tensor(stops, device=device),
        pad_id=pad_id,
        slot=torch.tensor([prompt_size - 1], device=device),
        done=torch.zeros(len(prompts), dtype=torch.bool, device=device),
        noise=noise,
        prompt_size=prompt_size,
        caches=[(empty.clone(), empty.clone()) for _ in range(config.num_hidden_layers)],
    )


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_new: int,
    temperatures: Sequence[float],
    stops: Sequence[int],
    pad_id: int,
    noise: torch.Tensor | None = None,
    goes_on: Callable[[int], bool] = lambda _: True,
) -> list[list[int]]:
    """Return each prompt's continuation: up to `num_new` ids, a stop id included.

    pad_id    may be one of the stop ids.
    goes_on   is called now and then with the number of ids of each unfinished continuation. If it returns False, all
              continuations end.
    """
    state = new_state(model, prompts, num_new, temperatures, stops, pad_id, noise)
    first = torch.arange(state.prompt_size, device=model.device)
    choose_tokens(state, run_slots(model, state, first, state.prompt_size))
    num_said = 1 + run_steps(model, state, num_new - 1, goes_on)
    new_ids = state.token_ids[:, state.prompt_size : state.prompt_size + num_said].tolist()
    return [_without_padding(row, stops, pad_id) for row in new_ids]


def _without_padding(row: list[int], stops: Sequence[int], pad_id: int) -> list[int]:
    for place, token in enumerate(row):
        if token in stops:
            return row[: place + 1]
        if token == pad_id:
            return row[:place]
    return row


def run_steps(
    model: LlamaForCausalLM, state: DecodingState, num_steps: int, goes_on: Callable[[int], bool] = lambda _: True
) -> int:
    """Run up to `num_steps` steps, through a captured graph on a GPU; return how many.

    `goes_on` as in `generate`.
    """
    is_on_cpu = model.device.type == "cpu"
    for index in range(num_steps if is_on_cpu else min(WARM_UP_STEPS, num_steps)):
        step(model, state)
        if is_on_cpu and (not goes_on(index + 2) or bool(state.done.all())):
            return index + 1
    if is_on_cpu or num_steps <= WARM_UP_STEPS:
        return num_steps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, state)
    for index in range(WARM_UP_STEPS, num_steps):
        graph.replay()
        is_checked = (index - WARM_UP_STEPS) % CHECK_EVERY == 0
        if is_checked and (bool(state.done.all()) or not goes_on(index + 2)):
            return index + 1
    return num_steps
