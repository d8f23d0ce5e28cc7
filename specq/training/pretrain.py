"""The target: next-token training on the packed corpus, then its loss on held-out documents, shard by shard."""

import time
from collections.abc import Iterator
from itertools import chain, islice

import click
import numpy as np
import torch
from transformers import LlamaForCausalLM

from specq.training.architecture import (
    build_model,
    compile_layers,
    hidden_states,
    load_model,
    next_token_labels,
    save_model,
    token_loss,
)
from specq.training.corpus import Dataset, load_dataset, load_tokenizer, pack_rows, row_batches
from specq.training.optimizer import apply_gradients, build_optimizers, schedule
from specq.training.settings import PairSettings

REPORT_EVERY = 100


def train_target(settings: PairSettings) -> float:
    """Train and save the target; return its last training loss."""
    torch.manual_seed(settings.seed)
    tokenizer, dataset = load_tokenizer(settings.tokenizer_folder), load_dataset(settings.dataset_file)
    model = build_model("target", tokenizer, settings.device)
    last_loss = fit(model, two_phases(dataset, settings, tokenizer.pad_token_id), settings, tokenizer.pad_token_id)
    save_model(model, tokenizer, settings.target_folder)
    rounded = load_model(settings.target_folder, settings.device)
    for shard, loss in held_out_losses(rounded, dataset, settings, tokenizer.pad_token_id).items():
        click.echo(f"held out {shard:32s} {loss:.3f}")
    return last_loss


def two_phases(dataset: Dataset, settings: PairSettings, pad_id: int) -> Iterator[np.ndarray]:
    """Yield the batches of the main phase, then those of the closing phase while the learning rate falls."""
    rng = np.random.default_rng(settings.seed)
    main_steps = round(settings.target_steps * (1 - settings.closing_share))
    phases = (
        row_batches(
            dataset,
            phase=phase,
            row_length=settings.row_length,
            batch_rows=settings.batch_rows,
            pad_id=pad_id,
            rng=rng,
        )
        for phase in (0, 1)
    )
    main, closing = phases
    return islice(chain(islice(main, main_steps), closing), settings.target_steps)


def fit(model: LlamaForCausalLM, batches: Iterator[np.ndarray], settings: PairSettings, pad_id: int) -> float:
    """Run the training loop over the batches; return the loss of the last one."""
    optimizers = build_optimizers(model, settings.target_lr, settings.weight_decay)
    loss_of = token_loss
    if settings.compiled:
        compile_layers(model)
        loss_of = torch.compile(token_loss)
    started, loss = time.monotonic(), torch.tensor(float("nan"))
    for step, rows in enumerate(batches):
        token_ids = torch.from_numpy(rows).to(settings.device)
        with settings.autocast():
            labels = next_token_labels(token_ids, pad_id)
            loss = loss_of(hidden_states(model, token_ids), model.lm_head.weight, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        apply_gradients(model, optimizers, schedule(step, settings.target_steps, settings.closing_share))
        if step % REPORT_EVERY == 0 or step + 1 == settings.target_steps:
            seconds = time.monotonic() - started
            click.echo(
                f"target step {step} loss {loss.item():.4f} tokens {(step + 1) * rows.size} seconds {seconds:.1f}"
            )
    return loss.item()


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, dataset: Dataset, settings: PairSettings, pad_id: int) -> dict[str, float]:
    """Return the mean loss a token on each shard's held-out documents, NaN without documents."""
    losses = {}
    for shard in dataset.shards:
        documents = [dataset.document(index) for index in dataset.members(shard, held_out=True)]
        losses[shard] = _mean_loss(model, documents, settings, pad_id) if documents else float("nan")
    return losses


def _mean_loss(model: LlamaForCausalLM, documents: list[np.ndarray], settings: PairSettings, pad_id: int) -> float:
    """Return the mean loss over documents packed into rows."""
    total, count = 0.0, 0
    rows = pack_rows(documents, settings.row_length, pad_id)
    for batch in np.array_split(rows, -(-len(rows) // 32)):
        token_ids = torch.from_numpy(batch).to(model.device)
        labels = next_token_labels(token_ids, pad_id)
        num_labels = int((labels >= 0).sum())
        total += token_loss(hidden_states(model, token_ids), model.lm_head.weight, labels).item() * num_labels
        count += num_labels
    return total / count
