"""The draft: distilled on the target's distributions, along the target's own outputs and along the corpus.

The loss of a position is (1 - h) KL(target || draft) + h CE(argmax of target, draft). The first term determines
acceptance in sampled speculation, the second in greedy speculation. h is `Settings.hard_weight`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from specq.training.architecture import (
    build_model,
    compile_layers,
    hidden_states,
    load_model,
    save_model,
)
from specq.training.corpus import load_dataset, load_tokenizer, row_batches
from specq.training.optimizer import apply_gradients, build_optimizers, schedule
from specq.training.rollouts import Rollouts, load_rollouts
from specq.training.settings import BatchSettings, PairSettings

ROW_LENGTHS = (128, 192, 256, 320, 384, 512)  # rollouts are padded to one of these
CORPUS_SHARE = 0.2
CLOSING_SHARE = 0.6
CHECK_ROLLOUTS = 256
REPORT_EVERY = 200


@dataclass(frozen=True)
class RolloutBatch:
    """Rows to distil on, and the positions that count."""

    token_ids: torch.Tensor  # [num_rows, length] int64
    counted: torch.Tensor  # [num_rows, length] float32, 1 where the next token is the target's own
    on_host: np.ndarray  # the same on the host: reading it does not wait for a device


def distil_draft(settings: PairSettings) -> float:
    """Distil and save the draft; return its last loss."""
    torch.manual_seed(settings.seed + 2)
    tokenizer, rollouts = load_tokenizer(settings.tokenizer_folder), load_rollouts(settings.rollouts_file)
    target = load_model(settings.target_folder, settings.device)
    draft = build_model(settings.draft_shape, tokenizer, settings.device)
    start_embeddings(draft, target)
    last_loss = fit_draft(draft, target, draw_batches(rollouts, settings, tokenizer.pad_token_id), settings)
    save_model(draft, tokenizer, settings.draft_folder)
    rounded = load_model(settings.draft_folder, settings.device)
    checked = range(min(CHECK_ROLLOUTS, len(rollouts.prompt_sizes)))
    share = agreement(rounded, target, make_batch(rollouts, checked, ROW_LENGTHS[-1], settings, tokenizer.pad_token_id))
    click.echo(f"{settings.draft_shape} agrees with the target on {share:.4f} of held-out rollout positions")
    return last_loss


@torch.no_grad()
def start_embeddings(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Initialise the draft's embeddings from the target's, on their leading principal directions."""
    embeddings = target.model.embed_tokens.weight.float()  # [vocab, target_hidden]
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[: draft.config.hidden_size]
    draft.model.embed_tokens.weight.copy_(embeddings @ directions.T)


def make_batch(
    rollouts: Rollouts, indices: Sequence[int], length: int, settings: BatchSettings, pad_id: int
) -> RolloutBatch:
    """Arrange rollouts one a row, exactly as they were generated, cut or padded to `length`."""
    rows = np.full((len(indices), length), pad_id, dtype=np.int64)
    counted = np.zeros((len(indices), length), dtype=np.float32)
    for row, mask, index in zip(rows, counted, indices, strict=True):
        rollout = rollouts.rollout(index)[:length]
        row[: len(rollout)] = rollout
        mask[rollouts.prompt_sizes[index] - 1 : len(rollout) - 1] = 1
    return RolloutBatch(send(rows, settings.device), send(counted, settings.device), counted)


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array on a device; the host continues during the copy."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def draw_batches(rollouts: Rollouts, settings: PairSettings, pad_id: int) -> Iterator[RolloutBatch]:
    """Yield `draft_steps` batches: a share `CORPUS_SHARE` of packed corpus rows, else rollouts of similar length."""
    rng = np.random.default_rng(settings.seed + 2)
    corpus = row_batches(
        load_dataset(settings.dataset_file),
        phase=1,
        row_length=settings.row_length,
        batch_rows=settings.batch_rows,
        pad_id=pad_id,
        rng=rng,
    )
    outputs = rollout_batches(rollouts, settings, pad_id, rng)
    for _ in range(settings.draft_steps):
        if rng.random() < CORPUS_SHARE:
            rows = next(corpus)
            counted = (rows != pad_id).astype(np.float32)
            yield RolloutBatch(send(rows, settings.device), send(counted, settings.device), counted)
        else:
            yield next(outputs)


def rollout_batches(
    rollouts: Rollouts, settings: BatchSettings, pad_id: int, rng: np.random.Generator
) -> Iterator[RolloutBatch]:
    """Yield batches of rollouts without end, each of one row length, all lengths mixed.

    The rollouts for the final check are left out.
    """
    sizes = np.diff(rollouts.bounds)
    buckets = np.searchsorted(ROW_LENGTHS[:-1], sizes)
    sizes_left_out = min(CHECK_ROLLOUTS, len(sizes) // 2)
    while True:
        groups = []
        for bucket, length in enumerate(ROW_LENGTHS):
            members = rng.permutation(np.flatnonzero(buckets == bucket))
            members = members[members >= sizes_left_out]
            num_rows = max(settings.batch_tokens // length, 1)
            # Rows of the next round fill the last batch, so that the shapes stay the same.
            full = np.resize(members, -(-len(members) // num_rows) * num_rows).reshape(-1, num_rows)
            groups += [(length, group) for group in full]
        for place in rng.permutation(len(groups)):
            length, group = groups[place]
            yield make_batch(rollouts, group.tolist(), length, settings, pad_id)


def distil_loss(
    draft_hidden: torch.Tensor,  # [num_rows, length, draft_hidden]
    draft_head: torch.Tensor,  # [vocab, draft_hidden]
    target_hidden: torch.Tensor,  # [num_rows, length, target_hidden]
    target_head: torch.Tensor,  # [vocab, target_hidden]
    counted: torch.Tensor,  # [num_rows, length]
    hard_weight: float,
) -> torch.Tensor:
    """Return the mean loss over the counted positions."""
    draft_logits = functional.linear(draft_hidden, draft_head).float()
    losses = token_losses(draft_logits, functional.linear(target_hidden, target_head).float(), hard_weight)
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def token_losses(draft_logits: torch.Tensor, target_logits: torch.Tensor, hard_weight: float) -> torch.Tensor:
    """Return the loss of each position, [...], given float32 logits [..., vocab]."""
    draft_logs = functional.log_softmax(draft_logits, dim=-1)
    target_logs = functional.log_softmax(target_logits, dim=-1)
    divergence = divergences(target_logs, draft_logs)
    first_choice = -draft_logs.gather(-1, target_logits.argmax(-1, keepdim=True)).squeeze(-1)
    return (1 - hard_weight) * divergence + hard_weight * first_choice


def divergences(of_logs: torch.Tensor, from_logs: torch.Tensor) -> torch.Tensor:
    """Return KL(of || from) in nats for each position, [...], given log-probabilities [..., vocab]."""
    return (of_logs.exp() * (of_logs - from_logs)).sum(-1)


def fit_draft(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, batches: Iterator[RolloutBatch], settings: PairSettings
) -> float:
    """Run the distillation loop over the batches; return the loss of the last one."""
    optimizers = build_optimizers(draft, settings.draft_lr, weight_decay=0.01)
    loss_of = distil_loss
    if settings.compiled:
        compile_layers(draft)
        compile_layers(target)
        loss_of = torch.compile(distil_loss, dynamic=False)
    started, loss = time.monotonic(), torch.tensor(float("nan"))
    for step, batch in enumerate(batches):
        with settings.autocast():
            with torch.no_grad():
                taught = hidden_states(target, batch.token_ids)
            drafted = hidden_states(draft, batch.token_ids)
            heads = draft.lm_head.weight, target.lm_head.weight
            loss = loss_of(drafted, heads[0], taught, heads[1], batch.counted, settings.hard_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        apply_gradients(draft, optimizers, schedule(step, settings.draft_steps, CLOSING_SHARE))
        if step % REPORT_EVERY == 0 or step + 1 == settings.draft_steps:
            seconds = time.monotonic() - started
            click.echo(f"{settings.draft_shape} step {step} loss {loss.item():.4f} seconds {seconds:.1f}")
    return loss.item()


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, target: LlamaForCausalLM, batch: RolloutBatch) -> float:
    """Return how often both models' first choices agree over the counted positions."""
    choices = [
        functional.linear(hidden_states(model, batch.token_ids), model.lm_head.weight).argmax(-1)
        for model in (draft, target)
    ]
    return (((choices[0] == choices[1]) * batch.counted).sum() / batch.counted.sum().clamp(min=1)).item()
