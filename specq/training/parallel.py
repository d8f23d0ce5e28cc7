"""The stages of `specq train parallel`, each a function of the settings: a parallel draft model (PARD, An et al. 2025,
arXiv 2504.18583) for a target that exists, started from its autoregressive draft model.

rollouts   as of `specq train draft`: the target answers prompts of the corpus
draft      the draft learns, for so many seconds, what the target says at each place behind a token: half its
           distribution there and half the likeliest token, from the token's own row and from masks behind it. Of the
           tokens, a random share of `keep` gets a first mask, of these a share of `keep` a second, and so on, but a
           mask at no place fewer than `least_keep` of all ("conditional drop", section 3.2). The loss of a place counts
           `depth_decay` times that of the one before it. With `share` the embedding and the head stay those of the
           model it starts from. A run that was cut off goes on; the draft is written in 8 bits
evaluate   how many of the target's tokens the 8-bit draft foresees, benchmark by benchmark and depth by depth, beside
           the draft model that it was started from
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import torch

from specq.protocol import Int64Array
from specq.training.architecture import hidden_states
from specq.training.distil import RolloutBatch, rollout_batches, send
from specq.training.draft import all_rollouts, check_rollouts, frequent_tokens, load_target
from specq.training.draft_network import save_draft
from specq.training.draft_settings import ParallelSettings
from specq.training.optimizer import build_optimizers
from specq.training.parallel_evaluation import evaluate
from specq.training.parallel_network import Masks, ParallelDraft, foresee, open_draft, share
from specq.training.runs import TrainingRun, depth_weights
from specq.training.teaching import fill_up, mean_loss, teach

__all__ = ["evaluate", "train_draft"]

MASK_BLOCK = 64  # a text is given a multiple of so many masks, so that shapes recur


def train_draft(settings: ParallelSettings) -> None:
    """Train the draft on all rollouts and write it to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    check_rollouts(rollouts, settings.target, target, settings.num_places, f"{settings.num_places} places")
    torch.manual_seed(settings.seed)
    draft = open_draft(
        settings.draft,
        settings.target,
        settings.num_places,
        settings.device,
        lambda: frequent_tokens(rollouts, settings.head_size),
        settings.head_size,
    )
    if settings.share:
        draft = share(draft, settings.draft, settings.out)
    network, shape, token_ids = draft
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels")
    output = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    optimizers = build_optimizers(network, settings.lr, weight_decay=0.01, matrix_lr=settings.matrix_lr)
    run = TrainingRun(network, optimizers, settings.state_file, _about(settings, draft))
    run.resume(settings.device)
    rng = np.random.default_rng([settings.seed, run.step])
    batches = rollout_batches(rollouts, settings, chat.stops[0], rng)
    run.fit(
        lambda: place_losses(draft, target, output, next(batches), settings, rng),
        depth_weights(settings.depth_decay, settings.num_places),
        settings.seconds,
        "place",
    )
    save_draft(network, shape, token_ids, settings.out)


def _about(settings: ParallelSettings, draft: ParallelDraft) -> str:
    """Return what must be the same for a run to go on."""
    own = settings.num_places, settings.keep, settings.least_keep, settings.depth_decay, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return f"{settings.target} {settings.draft} {draft.shape.shared} {own} {rates} {len(draft.token_ids)} {int(draft.token_ids.sum())}"


def draw_masks(counted: np.ndarray, settings: ParallelSettings, rng: np.random.Generator) -> Int64Array:
    """Return i64[2, rows, n]: anchors and places of the masks of a batch, of which `counted` [rows, length] marks what
    counts. Those of a token are the first some, and all stand where the next token is the target's own."""
    is_said = counted > 0
    sizes, length = is_said.sum(1, keepdims=True), is_said.shape[1]
    behind = length - is_said[:, ::-1].argmax(1)[:, None] if length else sizes  # the last that counts, and one
    order = np.where(is_said, rng.random(is_said.shape), 2.0).argsort(1).argsort(1)
    has_mask = np.stack(
        [
            is_said
            & (order < np.rint(sizes * max(settings.keep**place, settings.least_keep)))
            & (np.arange(length) + place < behind)
            for place in range(1, settings.num_places)
        ],
        1,
    )  # [rows, places, length]
    rows, places, anchors = has_mask.nonzero()
    counts = np.bincount(rows, minlength=len(counted))
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    masks = np.zeros((2, len(counted), -(-max(1, counts.max()) // MASK_BLOCK) * MASK_BLOCK), np.int64)
    masks[0] = -1
    masks[:, rows, slots] = anchors, places + 1
    return masks


def place_losses(
    draft: ParallelDraft,
    target: Any,
    output: torch.Tensor,
    batch: RolloutBatch,
    settings: ParallelSettings,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return f32[places]: the mean loss of each, over the rows of a batch that speak of the target's own tokens;
    `output` [columns, hidden]: the target's head over the draft's tokens."""
    masks = draw_masks(batch.on_host, settings, rng)
    lessons = [_lessons(masks, number, batch) for number in range(1, settings.num_places)]
    matrix = draft.network.lm_head.weight
    with settings.autocast():
        with torch.no_grad():
            taught = teach(hidden_states(target, batch.token_ids), output, batch, settings.hard_weight)
        on_device = Masks(*send(masks, settings.device))
        texts, foreseen = (
            states.flatten(0, 1)
            for states in foresee(draft.network, batch.token_ids, on_device, draft.shape.vocab_size)
        )
        said = texts.index_select(0, taught.places)
        losses = [mean_loss(said, matrix, taught.wanted, taught.floor, taught.counted)]
        for rows, labels, counted in lessons:
            said, wanted = foreseen.index_select(0, rows), taught.wanted.index_select(0, labels)
            losses.append(mean_loss(said, matrix, wanted, taught.floor[labels], counted))
        return torch.stack(losses)


def _lessons(masks: Int64Array, place: int, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which of the masks [rows * n] stand at a place, which of the places that `teach` gives each is to say, and
    which of these count."""
    anchors, places = masks
    rows, slots = (places == place).nonzero()
    number = (batch.on_host > 0).cumsum().reshape(batch.on_host.shape) - 1
    own, counted = fill_up(rows * places.shape[1] + slots, batch)
    labels, _ = fill_up(number[rows, anchors[rows, slots] + place], batch)
    return own, labels, counted
