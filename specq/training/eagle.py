"""The stages of `specq train eagle3`, each a function of the settings: an EAGLE-3 head for an unchanged target.

The sizes of a target's hidden states differ greatly. Behind the middle layers of a small model some channels are a
hundred times larger than others, and all channels of the first token are. So a head in training reads each channel
divided by its usual size (`channel_scales`). When the head is written, its first matrix absorbs these factors. The
head's layer adds to the normalised state (`EagleShape.norm_before_residual`), because its output would be lost beside
such large values.

In the training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2) a row meets its own errors, as in drafting.
After the pass over a text with the target's states, each row continues alone with the tokens of the text and its own
states. In step j it attends to the same rows as in step 0, and to its own rows of the steps since.

rollouts   as in `specq train draft`: the target answers prompts of the corpus.
head       the head learns for a given time. It learns the target's output at the positions that it predicts in each
           step of the training-time test. As for a draft model, half of the loss is
           on the target's distribution and half on the likeliest token. Each step's loss has `depth_decay` times the
           weight of the step before. The head begins with the values and tokens of the head in `start`, if given. An
           interrupted run continues. The head is written in bfloat16.
evaluate   how many of the target's tokens the head predicts, benchmark by benchmark and depth by depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.loading import EagleHead, load_eagle
from specq.drafting.eagle3.network import EagleNetwork
from specq.protocol import ConfigError, Int32Array
from specq.training.architecture import tapped_states
from specq.training.distil import ROW_LENGTHS, RolloutBatch, make_batch, rollout_batches
from specq.training.draft import all_rollouts, check_rollouts, frequent_tokens, load_target
from specq.training.foresight import CHAIN, TREE, info_of, measure_heads
from specq.training.heads import shape_of, write_heads
from specq.training.optimizer import build_optimizers
from specq.training.rollouts import Rollouts
from specq.training.runs import TrainingRun, depth_weights
from specq.training.settings import EagleSettings
from specq.training.teaching import mean_loss, teach

INITIAL_STD = 0.02
LEAST_SCALE = 1e-3
MAY_DIFFER = ("max_position_embeddings",)  # values that may differ in a head to start from


def build_eagle(shape: eagle_form.EagleShape, target: Any, token_ids: Int32Array) -> EagleNetwork:
    """Return a head that begins with the target's final norm and output matrix; its layer adds nothing yet."""
    network = EagleNetwork(shape, target.get_input_embeddings().weight.detach())
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
        for silent in (network.midlayer.self_attn.o_proj, network.midlayer.mlp.down_proj):
            nn.init.zeros_(silent.weight)
        network.norm.weight.copy_(target.model.norm.weight)
        network.lm_head.weight.copy_(target.lm_head.weight[torch.from_numpy(token_ids).long().to(target.device)])
    nn.Module.to(network, target.device)
    return network


def start_eagle(network: EagleNetwork, head: EagleHead, scales: torch.Tensor, path: Path) -> None:
    """Give a network the values of an earlier head, from `path`; its states will be divided by `scales`.

    Raises ConfigError for a head of another shape.
    """
    shape, found = network.shape, replace(head.network.shape, layers=head.layers)
    wrong = [name for name, value in asdict(shape).items() if name not in MAY_DIFFER and getattr(found, name) != value]
    if wrong:
        raise ConfigError(
            f"{path} is a head of another shape: {wrong[0]} is {getattr(found, wrong[0])}, and of the head to be "
            f"trained {getattr(shape, wrong[0])}"
        )
    state = head.network.float().state_dict()
    network.load_state_dict(state | {"fc.weight": state["fc.weight"] * scales})


def channel_scales(taps: torch.Tensor) -> torch.Tensor:
    """Return f32[width]: the root mean square of each channel of hidden states [n, width]."""
    return taps.float().square().mean(0).sqrt().clamp(min=LEAST_SCALE)


def trained_states(
    network: EagleNetwork, taps: torch.Tensor, token_ids: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yield the states [rows, length, hidden] of each step.

    Row t of step j has read the tokens up to t + 1 + j, and predicts the next one. States after a text's end are
    meaningless.

    taps        [rows, length, width]: the target's hidden states.
    token_ids   i64[rows, length].
    """
    length = token_ids.shape[1]
    attention = _OwnSteps(length, token_ids.device)
    positions = torch.arange(length, device=token_ids.device).expand_as(token_ids)
    states = network.project(taps)
    for step in range(num_steps):
        read = functional.pad(token_ids[:, 1 + step :], (0, min(1 + step, length)))[:, :length]
        states = network(states, read, network.rotations(positions + step, states.dtype), attention)
        yield states


class _OwnSteps:
    """Attention of one step after the other.

    A row attends to the first step's rows up to its own, and to its own rows of the later steps.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values [b, heads, length, dim]

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = queries.shape[2] // keys.shape[2]
        queries = queries.transpose(1, 2) * queries.shape[-1] ** -0.5  # [b, heads, length, dim]
        self._steps.append(
            (keys.transpose(1, 2).repeat_interleave(group, 1), values.transpose(1, 2).repeat_interleave(group, 1))
        )
        (first_keys, first_values), *own = self._steps
        if not own:
            found = functional.scaled_dot_product_attention(
                queries, first_keys, first_values, is_causal=True, scale=1.0
            )
            return found.transpose(1, 2)
        before = (queries @ first_keys.mT).masked_fill(self._hidden, -torch.inf)  # [b, heads, length, length]
        since = torch.stack([(queries * own_keys).sum(-1) for own_keys, _ in own], -1)  # [b, heads, length, steps]
        with torch.autocast(before.device.type, enabled=False):  # it would copy all values to float32 first
            shares = torch.cat([before, since.to(before.dtype)], -1).softmax(-1)
        found = shares[..., : before.shape[-1]] @ first_values
        for i, (_, own_values) in enumerate(own):
            found = found + shares[..., before.shape[-1] + i, None] * own_values
        return found.transpose(1, 2)


def save_eagle(
    network: EagleNetwork, shape: eagle_form.EagleShape, token_ids: Int32Array, scales: torch.Tensor, out: Path
) -> None:
    """Write a head in bfloat16, without the target's embedding.

    The head has read the target's hidden states divided by `scales`.
    """
    values = {name: value.detach() for name, value in network.state_dict().items()}
    values["fc.weight"] = values["fc.weight"] / scales
    tensors = {name: value.bfloat16().cpu().contiguous() for name, value in values.items()}
    ids = torch.from_numpy(token_ids).long()
    tensors[eagle_form.TO_TARGET] = ids - torch.arange(len(ids))
    tensors[eagle_form.FROM_TARGET] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
    write_heads(out, eagle_form.WEIGHTS[0], tensors, shape.config())


__all__ = ["evaluate", "train_head"]

OUTSIDE = ("fc", "lm_head")  # of the layer
SCALED_BY = 32  # answers: the first ones
FORESEEN = 8  # tokens, in an evaluation
TREES = {
    "chain": (CHAIN, FORESEEN),
    "tree": (TREE, FORESEEN),
    "chain of 4": (CHAIN, 4),
    "tree of 4": (TREE, 4),
    "chain of 5": (CHAIN, 5),
}


def train_head(settings: EagleSettings) -> None:
    """Train the head on all rollouts and write it to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    check_rollouts(rollouts, settings.target, target, settings.num_steps + 1, f"{settings.num_steps} steps")
    torch.manual_seed(settings.seed)
    start = _start(settings, target)
    token_ids = frequent_tokens(rollouts, settings.head_size) if start is None else _columns(start)
    shape = head_shape(settings, target, len(token_ids))
    network = build_eagle(shape, target, token_ids)
    output = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    click.echo(
        f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels; "
        f"states behind layers {', '.join(map(str, shape.layers))}"
    )
    scales = _scales(target, rollouts, shape.layers, settings)
    if start is not None:
        start_eagle(network, start, scales, Path(str(settings.start)))
    rates = {"lr": settings.lr, "matrix_lr": settings.matrix_lr}
    optimizers = build_optimizers(network, weight_decay=0.0, outside=OUTSIDE, **rates)
    run = TrainingRun(network, optimizers, settings.state_file, _about(settings, shape, token_ids))
    run.resume(settings.device)
    batches = rollout_batches(rollouts, settings, chat.stops[0], np.random.default_rng([settings.seed, run.step]))
    run.fit(
        lambda: step_losses(network, target, output, scales, next(batches), settings),
        depth_weights(settings.depth_decay, settings.num_steps),
        settings.seconds,
        "step",
    )
    save_eagle(network, shape, token_ids, scales, settings.out)


def _start(settings: EagleSettings, target: Any) -> EagleHead | None:
    """Return the head to start from, if one is given."""
    if settings.start is None:
        return None
    info = info_of(target, settings.target)
    return load_eagle(str(settings.start), str(settings.target), info, str(settings.device))


def _columns(head: EagleHead) -> Int32Array:
    """Return the tokens that a head may predict."""
    all_tokens: Int32Array = np.arange(head.network.shape.draft_vocab_size, dtype=np.int32)
    return all_tokens if head.token_ids is None else head.token_ids


@torch.no_grad()
def _scales(target: Any, rollouts: Rollouts, layers: tuple[int, ...], settings: EagleSettings) -> torch.Tensor:
    """Return the size of the target's hidden states, channel by channel.

    It always uses the same answers, so that a run can continue.
    """
    (answered,) = (np.diff(rollouts.bounds) > rollouts.prompt_sizes).nonzero()
    chosen = answered[:SCALED_BY].tolist()
    longest = max(len(rollouts.rollout(index)) for index in chosen)
    length = next((length for length in ROW_LENGTHS if length >= longest), ROW_LENGTHS[-1])
    batch = make_batch(rollouts, chosen, length, settings, pad_id=0)
    with settings.autocast():
        taps, _ = tapped_states(target, batch.token_ids, layers)
    return channel_scales(taps[batch.counted > 0])


def head_shape(settings: EagleSettings, target: Any, head_size: int) -> eagle_form.EagleShape:
    """Return the content of the head's config.json."""
    common = shape_of(target, settings.target)
    common["intermediate_size"] = settings.intermediate_size or common["intermediate_size"]
    return eagle_form.EagleShape(
        **common,
        draft_vocab_size=head_size,
        norm_before_residual=True,
        layers=layers_of(target.config.num_hidden_layers),
    )


def layers_of(num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target that its head reads: the usual ones, or the nearest ones in a shallow target."""
    if num_layers < eagle_form.NUM_TAPS:
        raise ConfigError(f"the target has {num_layers} layers; an EAGLE-3 head reads {eagle_form.NUM_TAPS}")
    if num_layers >= eagle_form.LEAST_LAYERS:
        return eagle_form.default_layers(num_layers)
    return 0, (num_layers - 1) // 2, num_layers - 1


def _about(settings: EagleSettings, shape: eagle_form.EagleShape, token_ids: Int32Array) -> str:
    """Return the values that must be equal for a run to continue."""
    own = settings.num_steps, settings.depth_decay, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return (
        f"eagle3 scaled {settings.target} {settings.start} {shape} {own} {rates} {len(token_ids)} "
        f"{int(token_ids.sum())}"
    )


def step_losses(
    network: EagleNetwork,
    target: Any,
    output: torch.Tensor,
    scales: torch.Tensor,
    batch: RolloutBatch,
    settings: EagleSettings,
) -> torch.Tensor:
    """Return f32[steps]: the mean loss of each step.

    It covers the rows of a batch whose token and label are the target's own.
    """
    length, is_said, losses = batch.token_ids.shape[1], batch.counted.flatten(), []
    with settings.autocast():
        with torch.no_grad():
            taps, hidden = tapped_states(target, batch.token_ids, network.shape.layers)
            taught = teach(hidden, output, batch, settings.hard_weight)
        for step, states in enumerate(trained_states(network, taps / scales, batch.token_ids, settings.num_steps)):
            ahead = step + 1
            places = (taught.places - ahead).clamp(min=0)
            counted = taught.counted * is_said[places] * (taught.places % length >= ahead)
            said = network.norm(states.flatten(0, 1).index_select(0, places))
            losses.append(mean_loss(said, network.lm_head.weight, taught.wanted, taught.floor, counted))
    return torch.stack(losses)


# --- evaluation -------------------------------------------------------------------------------------------------------


class _Eagle:
    """Implements `Foresight`: each position of a text continues as in the training-time test."""

    def __init__(self, target: Any, head: EagleHead) -> None:
        self._target, self._head, self.token_ids = target, head, head.token_ids

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        network = self._head.network
        token_ids = torch.tensor([prompt + answer], device=self._target.device)
        taps, _ = tapped_states(self._target, token_ids, self._head.layers)
        rows = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        steps = trained_states(network, taps, token_ids, FORESEEN)
        return torch.stack([network.logits(states[0, rows]).float() for states in steps], 1)


def evaluate(settings: EagleSettings) -> None:
    """Measure the written head on every benchmark and write the report."""
    target, chat = load_target(settings)
    info = info_of(target, settings.target)
    head = load_eagle(str(settings.out), str(settings.target), info, str(settings.device))
    measure_heads(target, _Eagle(target, head), chat, settings, TREES)
