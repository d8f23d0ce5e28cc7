"""The stages of `specq train block`, each a function of the settings: a block drafter for an unchanged target.

The form is DFlash's (arXiv 2602.06036), see `specq.drafting.block.form`. Layers have the target's shape.

rollouts   as in `specq train draft`: the target answers prompts of the corpus.
drafter    the drafter learns for a given time. Each row of a batch has blocks at random anchors in the target's answer.
           A block sees the features before its anchor. Its masks learn the target's output at their positions. As for
           a draft model, half of the loss is on the target's distribution and half on the likeliest token. Each
           place's loss has `depth_decay` times the weight of the place before. A place behind a token that is not the
           target's likeliest one counts `off_path`: no greedy text has it. An interrupted run continues. The drafter is
           written in bfloat16.
evaluate   how many of the target's tokens the drafter predicts, benchmark by benchmark and depth by depth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.block import form as block_form
from specq.drafting.block.network import BlockDrafter, BlockNetwork, load_block
from specq.drafting.head_layers import Attend, attend_to
from specq.protocol import ConfigError, Int32Array, Int64Array
from specq.training.architecture import tapped_states
from specq.training.distil import RolloutBatch, rollout_batches, send
from specq.training.draft import all_rollouts, check_rollouts, frequent_tokens, load_target
from specq.training.foresight import info_of, measure_heads
from specq.training.heads import shape_of, write_heads
from specq.training.optimizer import build_optimizers
from specq.training.runs import TrainingRun, depth_weights
from specq.training.settings import BlockSettings
from specq.training.teaching import Taught, mean_loss, teach

__all__ = ["evaluate", "train_drafter"]

INITIAL_STD = 0.02
OUTSIDE = ("fc",)  # of the layers
BELOW_LAST = 3  # the last layer that is read is so many below the number of the target's layers, as in DFlash


def build_block(shape: block_form.BlockShape, target: Any, token_ids: Int32Array) -> BlockNetwork:
    """Return a fresh drafter that begins with the target's final norm."""
    embedding = target.get_input_embeddings().weight.detach()
    columns = torch.from_numpy(token_ids).long().to(target.device)
    network = BlockNetwork(shape, embedding, target.lm_head.weight.detach()[columns])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD * ((2 * shape.num_layers) ** -0.5 if is_last else 1.0))
        nn.init.normal_(network.mask_embedding, std=float(embedding.float().std()))
        network.norm.weight.copy_(target.model.norm.weight)
    nn.Module.to(network, target.device)
    return network


def layers_of(num_layers: int, count: int) -> tuple[int, ...]:
    """Return the layers of a target that a drafter reads: `count` evenly spaced ones, from 1 to num_layers - 3.

    A shallow target has others. Raises ConfigError for a target with fewer layers.
    """
    if num_layers < count:
        raise ConfigError(
            f"the target has {num_layers} layers, and the drafter would read {count}; give a lower --num-states"
        )
    first, last = (1, num_layers - BELOW_LAST) if num_layers - BELOW_LAST >= count else (0, num_layers - 1)
    return tuple(np.linspace(first, last, count).round().astype(int).tolist()) if count > 1 else (num_layers // 2,)


def block_states(
    network: BlockNetwork, taps: torch.Tensor, token_ids: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Return what the masks of blocks say, [rows, anchors, places, hidden].

    taps        [rows, length, width]: the target's hidden states.
    token_ids   i64[rows, length].
    anchors     i64[rows, anchors]: positions. A block sees the features before its anchor.
    """
    shape, (num_rows, length), device = network.shape, token_ids.shape, token_ids.device
    size, num_blocks = shape.block_size, anchors.shape[1]
    features = network.features(taps)
    every = torch.arange(length, device=device).expand(num_rows, -1)
    kept = network.feature_rows(features, network.rotations(every, features.dtype))
    x = network.blocks(token_ids.gather(1, anchors)).flatten(1, 2)
    positions = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
    blocks = torch.arange(num_blocks, device=device).repeat_interleave(size)
    is_before = every[:, None] < anchors.repeat_interleave(size, 1)[:, :, None]
    is_own = (blocks[:, None] == blocks).expand(num_rows, -1, -1)
    is_seen = torch.cat([is_before, is_own], 2)  # [rows, anchors * size, length + anchors * size]
    states = network(x, network.rotations(positions, x.dtype), _attention(kept, is_seen, shape.num_key_value_heads))
    return states.unflatten(1, (num_blocks, size))[:, :, 1:]  # type: ignore[no-any-return]


def _attention(kept: tuple[torch.Tensor, torch.Tensor], is_seen: torch.Tensor, num_heads: int) -> Any:
    """Return the attention of each layer over features, whose keys and values are kept, and blocks."""

    def attend(layer: int) -> Attend:
        own = slice(layer * num_heads, (layer + 1) * num_heads)

        def attention(queries: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            keys, values = (
                torch.cat([before[:, :, own], rows], 1).transpose(1, 2) for before, rows in zip(kept, new, strict=True)
            )
            return attend_to(queries, keys, values, is_seen)

        return attention

    return attend


class Labels(NamedTuple):
    """What blocks at anchors learn, on the device.

    anchors  i64[rows, anchors].
    places   i64[rows, anchors, places]: which of the taught positions.
    counted  f32[rows, anchors, places]: 1 where the token of the place is the target's own, else 0.
    """

    anchors: torch.Tensor
    places: torch.Tensor
    counted: torch.Tensor


def draw_labels(batch: RolloutBatch, num_anchors: int, num_places: int, rng: np.random.Generator) -> Labels:
    """Draw anchors among the positions of each row whose next token is the target's own."""
    is_said = batch.on_host > 0  # [rows, length]
    length = is_said.shape[1]
    order = np.argsort(np.where(is_said, rng.random(is_said.shape), 2.0), 1)  # those positions first
    some = np.maximum(is_said.sum(1), 1)[:, None]
    anchors: Int64Array = np.sort(np.take_along_axis(order, np.arange(num_anchors)[None] % some, 1), 1)
    at = anchors[:, :, None] + np.arange(num_places)
    within = np.minimum(at, length - 1)  # the last position of a row never counts
    rows = np.arange(len(at))[:, None, None]
    places = (is_said.ravel().cumsum() - 1).reshape(is_said.shape)[rows, within].clip(min=0)
    counted = is_said[rows, within]
    device = batch.token_ids.device
    return Labels(*(send(values, device) for values in (anchors, places, counted.astype(np.float32))))


def place_losses(
    network: BlockNetwork,
    target: Any,
    batch: RolloutBatch,
    token_ids: torch.Tensor,
    settings: BlockSettings,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return f32[places]: the mean loss of each place; `token_ids`: of the columns, i64[columns]."""
    output: torch.Tensor = network.get_buffer("output")
    labels = draw_labels(batch, settings.num_anchors, network.shape.num_places, rng)
    with settings.autocast():
        with torch.no_grad():
            taps, hidden = tapped_states(target, batch.token_ids, network.shape.layers)
            taught = teach(hidden, output, batch, settings.hard_weight)
            counted = labels.counted * path_weights(taught, labels, batch, token_ids, settings.off_path)
        states = block_states(network, taps, batch.token_ids, labels.anchors)
        losses = []
        for place in range(network.shape.num_places):
            which, weights = labels.places[:, :, place].flatten(), counted[:, :, place].flatten()
            wanted, floor = taught.wanted.index_select(0, which), taught.floor.index_select(0, which)
            losses.append(mean_loss(states[:, :, place].flatten(0, 1), output, wanted, floor, weights))
    return torch.stack(losses)


def path_weights(
    taught: Taught, labels: Labels, batch: RolloutBatch, token_ids: torch.Tensor, off_path: float
) -> torch.Tensor:
    """Return f32[rows, anchors, places]: 1, or `off_path` behind a token of the block that was not the likeliest."""
    likeliest = token_ids.index_select(0, taught.wanted.argmax(-1))
    after = (taught.places + 1).clamp(max=batch.token_ids.numel() - 1)
    is_likeliest = (batch.token_ids.flatten().index_select(0, after) == likeliest).float()
    of_block = is_likeliest.index_select(0, labels.places.flatten()).view(labels.places.shape)
    is_on_path = functional.pad(of_block[:, :, :-1].cumprod(2), (1, 0), value=1.0)
    return off_path + (1 - off_path) * is_on_path


def save_block(network: BlockNetwork, token_ids: Int32Array, out: Path) -> None:
    """Write a drafter in bfloat16, without the target's embedding and output matrix."""
    tensors = {name: value.detach().bfloat16().cpu().contiguous() for name, value in network.state_dict().items()}
    tensors[TOKEN_IDS] = torch.from_numpy(token_ids)
    write_heads(out, block_form.WEIGHTS[0], tensors, network.shape.config())


def train_drafter(settings: BlockSettings) -> None:
    """Train the drafter on all rollouts and write it to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    size = settings.block_size
    check_rollouts(rollouts, settings.target, target, size, f"blocks of {size} tokens")
    torch.manual_seed(settings.seed)
    token_ids = frequent_tokens(rollouts, settings.head_size)
    shape = block_shape_of(settings, target)
    network = build_block(shape, target, token_ids)
    click.echo(
        f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels; "
        f"states behind layers {', '.join(map(str, shape.layers))}"
    )
    optimizers = build_optimizers(
        network, weight_decay=0.0, outside=OUTSIDE, lr=settings.lr, matrix_lr=settings.matrix_lr
    )
    run = TrainingRun(network, optimizers, settings.state_file, _about(settings, shape, token_ids))
    run.resume(settings.device)
    rng = np.random.default_rng([settings.seed, run.step])
    batches: Iterator[RolloutBatch] = rollout_batches(rollouts, settings, chat.stops[0], rng)
    columns = torch.from_numpy(token_ids).long().to(settings.device)
    run.fit(
        lambda: place_losses(network, target, next(batches), columns, settings, rng),
        depth_weights(settings.depth_decay, shape.num_places),
        settings.seconds,
        "place",
    )
    save_block(network, token_ids, settings.out)


def block_shape_of(settings: BlockSettings, target: Any) -> block_form.BlockShape:
    """Return the content of the drafter's config.json."""
    return block_form.BlockShape(
        **shape_of(target, settings.target),
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        layers=layers_of(target.config.num_hidden_layers, settings.num_states),
        norms_states=True,
    )


def _about(settings: BlockSettings, shape: block_form.BlockShape, token_ids: Int32Array) -> str:
    """Return the values that must be equal for a run to continue."""
    own = settings.num_anchors, settings.depth_decay, settings.off_path, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return f"block {settings.target} {shape} {own} {rates} {len(token_ids)} {int(token_ids.sum())}"


# --- evaluation -------------------------------------------------------------------------------------------------------


class BlockForesight:
    """Implements `Foresight`: each token of an answer is the anchor of a block."""

    def __init__(self, target: Any, drafter: BlockDrafter) -> None:
        self._target, self._drafter, self.token_ids = target, drafter, drafter.token_ids

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        network = self._drafter.network
        token_ids = torch.tensor([prompt + answer], device=self._target.device)
        taps, _ = tapped_states(self._target, token_ids, network.shape.layers)
        anchors = torch.arange(len(prompt), token_ids.shape[1], device=token_ids.device)[None]
        return network.logits(block_states(network, taps, token_ids, anchors)[0]).float()


def evaluate(settings: BlockSettings) -> None:
    """Measure the written drafter on every benchmark and write the report."""
    target, chat = load_target(settings)
    info = info_of(target, settings.target)
    drafter = load_block(str(settings.out), str(settings.target), info, str(settings.device))
    measure_heads(target, BlockForesight(target, drafter), chat, settings)
