"""The stages of `specq train parallel`, each a function of the settings: a parallel draft model for an existing target.

The network is an existing draft model with masks, run over texts and masks at once. Its parameters have the names of
`specq.checkpoints.draft_form`, the form in which `specq.training.draft.save_draft` writes it.

The method is PARD (An et al. 2025, arXiv 2504.18583). It starts from the target's autoregressive draft model.

    rollouts   as in `specq train draft`: the target answers prompts of the corpus
    draft      the draft learns, for a given time, the target's output at each place behind a token. Half of the loss
               is on the target's distribution and half on the likeliest token. It predicts from the token's own row
               and from masks behind it. A random share `keep` of the tokens gets a first mask, a share `keep` of
               these a second, and so on, but each place has masks for at least `least_keep` of all tokens
               ("conditional drop", section 3.2). Each place's loss has `depth_decay` times the weight of the place
               before. With `share` the embedding and the head stay those of the starting model. An interrupted run
               continues. The draft is written in 8 bits
    evaluate   how many of the target's tokens the 8-bit draft predicts, benchmark by benchmark and depth by depth,
               beside the starting model

The evaluation plays rounds along the target's own text. One pass of each model along a text is enough. The reason: each
token's masks are beside the text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from specq.checkpoints import draft_form
from specq.engines import read_info
from specq.engines.torch import load_network
from specq.protocol import ConfigError, Int32Array, Int64Array
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.architecture import fuse_norms, hidden_states
from specq.training.chat_prompts import PromptFormat, bench_prompts
from specq.training.distil import RolloutBatch, rollout_batches, send
from specq.training.draft import (
    FactorisedEmbedding,
    all_rollouts,
    check_rollouts,
    frequent_tokens,
    keep_report,
    load_target,
    save_draft,
)
from specq.training.foresight import BEYOND, rank_figures, ranks_of, show_figures
from specq.training.optimizer import build_optimizers
from specq.training.records import bench_paths
from specq.training.report import SAMPLED_TEMPERATURE, answer_with_noise, conditions, count_rounds, draft_hits
from specq.training.runs import TrainingRun, depth_weights
from specq.training.settings import ParallelSettings
from specq.training.teaching import fill_up, mean_loss, teach


class ParallelDraft(NamedTuple):
    """A network, its shape, and the tokens of its head, token_ids i32[columns]."""

    network: LlamaForCausalLM
    shape: draft_form.DraftModelShape
    token_ids: Int32Array


class Masks(NamedTuple):
    """Masks behind texts, i64[texts, n] both.

    anchors   the position of the last token that a mask's pass has read. -1: no mask.
    places    how many positions behind the anchor the mask stands, from 1. It sees earlier masks of the same anchor.
    """

    anchors: torch.Tensor
    places: torch.Tensor


def open_draft(
    draft: Path, target: Path, num_places: int, device: torch.device, frequent: Callable[[], Int32Array], most: int
) -> ParallelDraft:
    """Load a draft model for training, in float32, with masks that begin as the mean of all embeddings.

    Existing masks stay as they are.

    frequent, most   the tokens of its head, if it is of Hugging Face layout and has more than `most` tokens.

    Raises ConfigError for a model that is not a Llama, or not for this target.
    """
    _check_tokenizer(draft, target)
    network: Any = load_network(draft, device, "float32")
    _check_llama(network, draft)
    tokenizer = load_tokenizer_files(target)["tokenizer.json"]
    known, size = getattr(network.lm_head, "token_ids", None), num_tokens(tokenizer)
    head = network.lm_head.weight.detach()
    if known is None:
        known = np.arange(size, dtype=np.int32) if size <= most else frequent()
        head = head[torch.from_numpy(known).to(device)]
    num_masks = getattr(network, "num_masks", 0)
    rows = network.get_input_embeddings().weight.detach()
    words, masks = rows[: len(rows) - num_masks], rows[len(rows) - num_masks :]
    own = draft_form.draft_shape(draft)
    weight, lift = _factors(words, own.embedding_rank if own else words.shape[1])
    fresh = words[:size].mean(0).expand(num_places - 1, -1)
    masks = torch.cat([masks, fresh])[: num_places - 1].clone()
    network.model.embed_tokens = FactorisedEmbedding(weight, lift, masks)
    network.lm_head = nn.Linear(head.shape[1], len(known), bias=False, device=device)
    network.lm_head.weight = nn.Parameter(head.clone())
    fuse_norms(network)
    network.requires_grad_(requires_grad=True)
    return ParallelDraft(network, _shape(network, len(known), (size, tokenizer_hash(tokenizer))), known)


def share(draft: ParallelDraft, start: Path, out: Path) -> ParallelDraft:
    """Let a draft, to be written to `out`, keep the embedding and the head of the starting model.

    The starting model is then needed beside it. Raises ConfigError for a model that is not of specq's own form.
    """
    shape = draft_form.draft_shape(start)
    if shape is None:
        raise ConfigError(
            f"{start} is not of the form that `specq train draft` writes; only such a model can share its embedding "
            f"and head"
        )
    place, _ = draft_form.owner(start, shape)
    embedding = draft.network.model.embed_tokens
    for kept in (embedding.weight, embedding.lift, draft.network.lm_head.weight):
        kept.requires_grad_(requires_grad=False)
    way = os.path.relpath(place.resolve(), out.resolve())
    return draft._replace(shape=replace(draft.shape, shared=Path(way).as_posix()))


def _check_tokenizer(draft: Path, target: Path) -> None:
    own, targets = read_info(draft).tokenizer_hash, read_info(target).tokenizer_hash
    if own != targets:
        raise ConfigError(
            f"{draft} is for another tokenizer ({own[:12] or 'none'}) than {target} ({targets[:12]}); a parallel "
            f"draft model starts from a draft model of its target's vocabulary"
        )


def _check_llama(network: Any, draft: Path) -> None:
    config = network.config
    is_plain = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default"
    if (
        config.model_type != "llama"
        or not is_plain
        or any(name.endswith(".bias") for name, _ in network.named_parameters())
    ):
        raise ConfigError(
            f"{draft} is {config.model_type}; a parallel draft model starts from a Llama with plain rotary positions "
            f"and no biases, such as `specq train draft` makes"
        )


def _factors(words: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [vocab, hidden] of this rank as factors [vocab, rank] and [hidden, rank]."""
    if rank >= words.shape[1]:
        return words.clone(), torch.eye(words.shape[1], device=words.device)
    directions = torch.linalg.svd(words, full_matrices=False).Vh[:rank]
    return words @ directions.T, directions.T.contiguous()


def _shape(network: Any, head_size: int, tokenizer: tuple[int, str]) -> draft_form.DraftModelShape:
    config, embedding = network.config, network.model.embed_tokens
    return draft_form.DraftModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=network.model.layers[0].self_attn.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        vocab_size=embedding.weight.shape[0],
        num_tokens=tokenizer[0],
        embedding_rank=embedding.weight.shape[1],
        head_size=head_size,
        tokenizer_hash=tokenizer[1],
        num_places=len(embedding.masks) + 1,
    )


def foresee(network: Any, token_ids: torch.Tensor, masks: Masks, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run texts [texts, length] and masks behind them, whose token ids begin at `vocab_size`.

    Returns the hidden states of both, [texts, length, hidden] and [texts, n, hidden].
    """
    length = token_ids.shape[1]
    steps = torch.arange(length, device=token_ids.device)
    positions = torch.cat([steps.expand(len(token_ids), -1), (masks.anchors + masks.places).clamp(min=0)], 1)
    ids = torch.cat([token_ids, vocab_size + (masks.places - 1).clamp(min=0)], 1)
    decoder = network.model
    hidden = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(hidden, positions)
    visible = _visible(length, masks)[:, None]
    for layer in decoder.layers:
        hidden = layer(hidden, attention_mask=visible, position_ids=positions, position_embeddings=rotary)
    normed: torch.Tensor = decoder.norm(hidden)
    return normed[:, :length], normed[:, length:]


def _visible(length: int, masks: Masks) -> torch.Tensor:
    """Return bool[texts, length + n, length + n]: which positions each row sees."""
    anchors, places = masks
    steps = torch.arange(length, device=anchors.device)
    of_masks = (anchors[:, :, None] == anchors[:, None]) & (places[:, None] <= places[:, :, None])
    of_texts = steps <= anchors[:, :, None]
    causal = (steps <= steps[:, None]).expand(len(anchors), -1, -1)
    nothing = causal.new_zeros(len(anchors), length, anchors.shape[1])
    return torch.cat([torch.cat([causal, nothing], 2), torch.cat([of_texts, of_masks], 2)], 1)


def evaluate(settings: ParallelSettings) -> None:
    """Measure the 8-bit draft on every benchmark and write the report."""
    shape = draft_form.draft_shape(settings.out)
    if shape is None or shape.num_places < 2:
        raise ConfigError(
            f"there is no parallel draft model in {settings.out}; run the stage 'draft' first, with the same --out"
        )
    target, chat = load_target(settings)
    draft, start = (load_network(path, settings.device) for path in (settings.out, settings.draft))
    torch.manual_seed(settings.seed)
    report: dict[str, Any] = conditions(settings.device)
    report["num_places"], report["num_parameters"] = shape.num_places, sum(p.numel() for p in draft.parameters())
    report["acceptance"] = {
        path.stem: _of_benchmark(target, draft, start, chat, path, settings) for path in bench_paths(settings.bench)
    }
    keep_report(report, settings)


def _of_benchmark(
    target: Any, draft: Any, start: Any, chat: PromptFormat, path: Path, settings: ParallelSettings
) -> dict[str, dict[str, Any]]:
    """Return the figures of one benchmark, for each sampling method; "start": the chain of the starting model."""
    prompts, found = bench_prompts(path, chat, settings), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        answers, noise = answer_with_noise(
            target, prompts, settings.bench_tokens, temperature, stops=chat.stops, pad_id=chat.stops[0]
        )
        ranks = [
            place_ranks(draft, prompt, answer, None if noise is None else temperature * noise[row])
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        chains = count_rounds(draft_hits(start, prompts, answers, temperature, noise), draft.num_masks + 1)
        figures = {**rank_figures(ranks), "start": chains.summary()}
        show_figures(path.stem, temperature, figures)
        found[f"T={temperature:g}"] = figures
    return found


@torch.no_grad()
def place_ranks(draft: Any, prompt: list[int], answer: list[int], noise: torch.Tensor | None) -> Int64Array:
    """Return ranks i64[tokens + 1, places] of an answer; see `specq.training.foresight`.

    Place i of the pass before token p has the rank that it gives token p + i. `noise` [tokens, vocab] is added to the
    logits of each token.
    """
    num_places, length = draft.num_masks + 1, len(answer)
    vocab_size = draft.get_input_embeddings().weight.shape[0] - draft.num_masks
    first = len(prompt) - 1
    pairs = [(first + p, place) for place in range(1, num_places) for p in range(max(length - place, 0))]
    masks = Masks(*torch.tensor(pairs, device=draft.device).reshape(-1, 2).T[:, None])
    texts, foreseen = foresee(draft, torch.tensor([prompt + answer], device=draft.device), masks, vocab_size)
    sizes = [max(length - place, 0) for place in range(1, num_places)]
    known = getattr(draft.lm_head, "token_ids", np.arange(draft.lm_head.weight.shape[0], dtype=np.int32))
    ranks = np.full((length + 1, num_places), BEYOND)
    for place, hidden in enumerate((texts[0, first : first + length], *torch.split(foreseen[0], sizes))):
        scores = draft.lm_head(hidden).float()
        own = ranks_of(scores, known, answer[place:], None if noise is None else noise[place:])
        ranks[: len(own), place] = own
    return ranks


__all__ = ["evaluate", "train_draft"]

MASK_BLOCK = 64  # a text gets a multiple of this number of masks, so that shapes recur


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
    """Return the values that must be equal for a run to continue."""
    own = settings.num_places, settings.keep, settings.least_keep, settings.depth_decay, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return (
        f"{settings.target} {settings.draft} {draft.shape.shared} {own} {rates} {len(draft.token_ids)} "
        f"{int(draft.token_ids.sum())}"
    )


def draw_masks(counted: np.ndarray, settings: ParallelSettings, rng: np.random.Generator) -> Int64Array:
    """Return i64[2, rows, n]: anchors and places of the masks of a batch.

    counted: [rows, length], marks the positions that count. A token has masks at its first places only. All masks stand
    where the next token is the target's own.
    """
    is_said = counted > 0
    sizes, length = is_said.sum(1, keepdims=True), is_said.shape[1]
    behind = length - is_said[:, ::-1].argmax(1)[:, None] if length else sizes  # position after the last that counts
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
    """Return f32[places]: the mean loss of each place, over rows of a batch that predict the target's own tokens.

    output: [columns, hidden], the target's head over the draft's tokens.
    """
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
    """Return the indices of masks [rows * n] at a place, their labels among the places of `teach`, and which count."""
    anchors, places = masks
    rows, slots = (places == place).nonzero()
    number = (batch.on_host > 0).cumsum().reshape(batch.on_host.shape) - 1
    own, counted = fill_up(rows * places.shape[1] + slots, batch)
    labels, _ = fill_up(number[rows, anchors[rows, slots] + place], batch)
    return own, labels, counted
