"""The stages of `specq train parallel`, each a function of the settings: a parallel draft model (PARD, An et al. 2025, arXiv 2504.18583) for a
target that exists, started from its autoregressive draft model.

rollouts   as of `specq train draft`: the target answers prompts of the corpus
draft      the draft learns, for so many seconds, what the target says at each place behind a token: half its distribution there and half the
           likeliest token, from the token's own row and from masks behind it. Of the tokens, a random share of `keep` gets a first mask, of
           these a share of `keep` a second, and so on, but a mask at no place fewer than `least_keep` of all ("conditional drop", section
           3.2). The loss of a place counts `depth_decay` times that of the one before it. A run that was cut off goes on; the draft is
           written in 8 bits
evaluate   how many of the target's tokens the 8-bit draft foresees, benchmark by benchmark and depth by depth, beside the draft model that
           it was started from
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional

from specq.training.architecture import hidden_states
from specq.training.distil import Batch, rollout_batches, token_losses
from specq.training.draft import all_rollouts, check_rollouts, frequent_tokens, load_target, roll_out
from specq.training.draft_network import save_draft
from specq.training.draft_settings import ParallelSettings
from specq.training.optimizer import build_optimizers
from specq.training.parallel_evaluation import evaluate
from specq.training.parallel_network import Masks, ParallelDraft, foresee, open_draft
from specq.training.runs import Run, depth_weights

__all__ = ["evaluate", "roll_out", "train_draft"]


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
    network, shape, token_ids = draft
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels")
    output = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    optimizers = build_optimizers(network, settings.lr, weight_decay=0.01, matrix_lr=settings.matrix_lr)
    run = Run(network, optimizers, settings.state_file, _about(settings, draft))
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
    return f"{settings.target} {settings.draft} {own} {rates} {len(draft.token_ids)} {int(draft.token_ids.sum())}"


def draw_masks(batch: Batch, settings: ParallelSettings, rng: np.random.Generator) -> Masks:
    """Return the masks of a batch: those of a token are the first some, and all stand where the next token is the target's own."""
    found = [_masks_of(row, settings, rng) for row in batch.counted.cpu().numpy()]
    masks = np.zeros((2, len(found), max(1, *(own.shape[1] for own in found))), np.int64)
    masks[0] = -1
    for row, own in enumerate(found):
        masks[:, row, : own.shape[1]] = own
    anchors, places = torch.from_numpy(masks).to(settings.device)
    return Masks(anchors, places)


def _masks_of(counted: np.ndarray, settings: ParallelSettings, rng: np.random.Generator) -> np.ndarray:
    """Return i64[2, n]: anchors and places of the masks of one text, of which `counted` [length] marks what counts."""
    (anchors,) = counted.nonzero()
    shuffled, parts = rng.permutation(anchors), []
    for place in range(1, settings.num_places):
        share = max(settings.keep**place, settings.least_keep)
        own = shuffled[: round(len(shuffled) * share)]
        own = own[own + place <= anchors[-1]] if len(own) else own
        parts.append(np.stack([own, np.full(len(own), place)]))
    return np.concatenate(parts, 1)


def place_losses(
    draft: ParallelDraft,
    target: Any,
    output: torch.Tensor,
    batch: Batch,
    settings: ParallelSettings,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Return f32[places]: the mean loss of each, over the rows of a batch that speak of the target's own tokens; `output` [columns, hidden]:
    the target's head over the draft's tokens."""
    masks = draw_masks(batch, settings, rng)
    is_said = batch.counted > 0  # [rows, length]: the next token is the target's own
    place = is_said.flatten().cumsum(0).view_as(is_said) - 1  # among those
    of_mask = place.gather(1, (masks.anchors + masks.places).clamp(min=0))
    with settings.autocast():
        with torch.no_grad():
            taught = functional.linear(hidden_states(target, batch.token_ids)[is_said], output)  # [n, columns]
        texts, foreseen = foresee(draft.network, batch.token_ids, masks, draft.shape.vocab_size)
        rows = [(texts[is_said], taught)]
        for number in range(1, settings.num_places):
            own = masks.places == number
            rows.append((foreseen[own], taught[of_mask[own]]))
        head = draft.network.lm_head
        each = (
            token_losses(head(hidden).float(), of_target.float(), settings.hard_weight) for hidden, of_target in rows
        )
        return torch.stack([losses.sum() / max(len(losses), 1) for losses in each])
