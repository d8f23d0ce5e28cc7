"""The stages of `specq train draft`, each a function of the settings: a small draft model for an existing target.

The network is a transformers Llama with a factorised embedding and a reduced head. Its parameters have the names of
`specq.checkpoints.draft_form`, the form in which `save_draft` writes it.

rollouts   the target answers prompts of the corpus for a given time, half greedily, half at a temperature.
           See `answering`.
draft      the draft learns for a given time. Half of the loss is on the target's distribution over the tokens of its
           head, and half on the likeliest of these tokens. It is written in 8 bits.
evaluate   how often the target accepts the 8-bit draft, benchmark by benchmark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from specq.checkpoints import draft_form
from specq.engines.torch import load_network
from specq.protocol import ConfigError, Int32Array
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.architecture import ROPE_THETA, fuse_norms, hidden_states
from specq.training.chat_prompts import PromptFormat, bench_prompts, chat_of
from specq.training.distil import RolloutBatch, distil_loss, rollout_batches
from specq.training.optimizer import apply_gradients, build_optimizers, check_losses
from specq.training.records import bench_paths, rollout_paths
from specq.training.report import SAMPLED_TEMPERATURE, conditions, measure
from specq.training.rollouts import Rollouts, join_rollouts, load_rollouts
from specq.training.settings import DraftSettings, RunSettings

EMBEDDING_STD, HEAD_STD, LAYER_STD = 1.0, 0.02, 0.02


class FactorisedEmbedding(nn.Module):
    """Rows of `weight` [vocab, rank], lifted by `lift` [hidden, rank].

    With `masks` [any, hidden], token ids from vocab on read these.
    """

    def __init__(self, weight: torch.Tensor, lift: torch.Tensor, masks: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.lift = nn.Parameter(weight), nn.Parameter(lift)
        self.masks = None if masks is None else nn.Parameter(masks)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        vocab = len(self.weight)
        words = functional.linear(functional.embedding(token_ids.clamp(max=vocab - 1), self.weight), self.lift)
        if self.masks is None:
            return words
        masks = functional.embedding((token_ids - vocab).clamp(min=0), self.masks)
        return torch.where((token_ids >= vocab)[..., None], masks.to(words.dtype), words)


def build_draft(shape: draft_form.DraftModelShape, target: Any, token_ids: Int32Array) -> LlamaForCausalLM:
    """Return a fresh draft on the target's device, in float32.

    Embedding and head begin as the target's embedding on its leading principal directions.
    """
    body = shape.llama_config() | {"vocab_size": 8}  # size of the embedding and head to be replaced
    network = LlamaForCausalLM(LlamaConfig(**body, initializer_range=LAYER_STD))
    _shrink(network, shape.num_hidden_layers)
    nn.Module.to(network, target.device)
    low = principal(target.get_input_embeddings().weight, shape.hidden_size)  # [vocab, hidden]
    first = low[:, : shape.embedding_rank]
    lift = torch.randn(shape.hidden_size, shape.embedding_rank, device=low.device) * shape.embedding_rank**-0.5
    network.model.embed_tokens = FactorisedEmbedding(first * (EMBEDDING_STD / first.std()), lift)
    head = low[torch.from_numpy(token_ids).to(low.device)]
    network.lm_head = nn.Linear(shape.hidden_size, shape.head_size, bias=False, device=low.device)
    network.lm_head.weight = nn.Parameter(head * (HEAD_STD / head.std()))
    return network


def _shrink(network: LlamaForCausalLM, num_layers: int) -> None:
    """Let the layers begin with small outputs: the more layers, the smaller each output."""
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * num_layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * num_layers) ** -0.5)


@torch.no_grad()
def principal(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """Return embeddings [vocab, size] in their leading principal directions, f32[vocab, width], padded with zeros."""
    embeddings = embeddings.float()
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[:width]
    return functional.pad(embeddings @ directions.T, (0, width - len(directions)))


def save_draft(network: LlamaForCausalLM, shape: draft_form.DraftModelShape, token_ids: Int32Array, out: Path) -> None:
    """Write a network in 8 bits, in the form of `specq.checkpoints.draft_form`."""
    tensors = {} if shape.shared else {draft_form.TOKEN_IDS: torch.from_numpy(token_ids)}
    matrices = draft_form.matrix_shapes(shape)
    for name, parameter in network.named_parameters():
        if shape.shared and draft_form.is_shared(name):
            continue
        tensors[name] = parameter.detach().float().cpu().contiguous()
        if name in matrices:
            values, scales = draft_form.to_int8(tensors[name].numpy())
            tensors[name], tensors[name + draft_form.SCALE] = torch.from_numpy(values), torch.from_numpy(scales)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / draft_form.WEIGHTS)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")


TARGETS = ("llama", "qwen2")  # the models that `decoding` supports
MAX_POSITIONS = 8192
WARM_UP_STEPS, WARM_UP_SHARE, CLOSING_SHARE = 200, 0.05, 0.55  # the shorter warm-up counts
DRAFT_LENGTHS = (1, 3, 4, 5, 8)
REPORT_EVERY_S = 20.0


def load_target(settings: RunSettings) -> tuple[Any, PromptFormat]:
    """Return the target's network, without gradients, and its chat format."""
    if not settings.target.exists():
        raise ConfigError(f"there is no {settings.target}; a draft is trained for a model that lies on this machine")
    network = load_network(settings.target, settings.device)
    if network.config.model_type not in TARGETS:
        raise ConfigError(
            f"{settings.target} is {network.config.model_type}; drafts are trained for {' and '.join(TARGETS)}"
        )
    fuse_norms(network)
    network.requires_grad_(requires_grad=False)
    stops = network.generation_config.eos_token_id
    return network, chat_of(settings.target, tuple(stops if isinstance(stops, list) else [stops] if stops else []))


# --- rollouts -----------------------------------------------------------------------------------------------------


def all_rollouts(settings: RunSettings) -> Rollouts:
    """Return the given rollouts and those of this run; ConfigError if there are none, or they have no answers."""
    paths = rollout_paths(settings.rollouts_folder, settings.rollouts)
    rollouts = join_rollouts([load_rollouts(path) for path in paths])
    if not rollouts.num_answered:
        raise ConfigError(f"{', '.join(map(str, paths))}: these rollouts contain no answers to train on")
    return rollouts


def check_rollouts(rollouts: Rollouts, checkpoint: Path, target: Any, least: int, who: str) -> None:
    """Raise ConfigError for rollouts of another target, and for those without an answer as long as `who` needs."""
    vocab_size = target.get_input_embeddings().weight.shape[0]
    if (largest := int(rollouts.token_ids.max())) >= vocab_size:
        raise ConfigError(
            f"the rollouts have token {largest}, but {checkpoint} has {vocab_size} tokens; they are for another target"
        )
    longest = int((np.diff(rollouts.bounds) - rollouts.prompt_sizes).max())
    if longest < least:
        raise ConfigError(f"the longest answer among the rollouts has {longest} tokens; {who} need {least}")


# --- training -----------------------------------------------------------------------------------------------------


def distil(settings: DraftSettings) -> None:
    """Train the draft on all rollouts and write it to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    torch.manual_seed(settings.seed)
    token_ids = frequent_tokens(rollouts, settings.head_size)
    shape = draft_shape(settings, target, len(token_ids))
    network = build_draft(shape, target, token_ids)
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels")
    batches = rollout_batches(rollouts, settings, chat.stops[0], np.random.default_rng(settings.seed))
    fit(network, target, token_ids, batches, settings)
    save_draft(network, shape, token_ids, settings.out)


def frequent_tokens(rollouts: Rollouts, count: int) -> Int32Array:
    """Return the most frequent tokens of the answers, at most `count`, ascending."""
    counts = np.bincount(rollouts.answered())
    ranked = np.argsort(-counts, kind="stable")[:count]
    chosen: Int32Array = np.sort(ranked[counts[ranked] > 0]).astype(np.int32)
    click.echo(f"{len(chosen)} tokens are {counts[chosen].sum() / counts.sum():.4f} of the answers")
    return chosen


def draft_shape(settings: DraftSettings, target: Any, head_size: int) -> draft_form.DraftModelShape:
    """Return the shape of the draft for a target."""
    tokenizer = load_tokenizer_files(settings.target)["tokenizer.json"]
    heads, left = divmod(settings.hidden_size, settings.head_dim)
    if left or settings.head_dim % 2:
        raise ConfigError(
            f"--hidden-size is {settings.hidden_size} and --head-dim {settings.head_dim}; give an even head size of "
            f"which the hidden size is a multiple"
        )
    return draft_form.DraftModelShape(
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=settings.head_dim,
        max_position_embeddings=min(target.config.max_position_embeddings, MAX_POSITIONS),
        rms_norm_eps=1e-5,
        rope_theta=ROPE_THETA,
        vocab_size=target.get_input_embeddings().weight.shape[0],
        num_tokens=num_tokens(tokenizer),
        embedding_rank=settings.embedding_rank,
        head_size=head_size,
        tokenizer_hash=tokenizer_hash(tokenizer),
    )


def fit(
    network: LlamaForCausalLM,
    target: Any,
    token_ids: Int32Array,
    batches: Iterator[RolloutBatch],
    settings: DraftSettings,
) -> None:
    """Run the distillation loop until the time is over: warm up, hold, and fall over the closing share of the time."""
    optimizers = build_optimizers(network, settings.lr, weight_decay=0.01, matrix_lr=settings.matrix_lr)
    target_head = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    started, said, num_labels, done = time.monotonic(), 0.0, 0, 0.0
    for step, batch in enumerate(batches):
        loss = loss_of(network, target, target_head, batch, settings)
        loss.backward()  # type: ignore[no-untyped-call]
        apply_gradients(network, optimizers, rate(step, done))
        num_labels += int(batch.counted.sum())
        seconds = time.monotonic() - started
        done = seconds / settings.seconds
        if seconds - said >= REPORT_EVERY_S or done >= 1:
            said = seconds
            click.echo(f"step {step + 1}, {num_labels} labels, loss {loss.item():.4f}, {seconds:.0f} s")
            check_losses([loss.item()], step + 1)
        if done >= 1:
            return


def rate(step: int, done: float) -> float:
    """Return the share of the peak rates at a step, when the share `done` of the time is over."""
    warm_up = max((step + 1) / WARM_UP_STEPS, done / WARM_UP_SHARE)
    return min(warm_up, max(0.01, (1 - done) / CLOSING_SHARE), 1.0)


def loss_of(
    network: LlamaForCausalLM, target: Any, target_head: torch.Tensor, batch: RolloutBatch, settings: DraftSettings
) -> torch.Tensor:
    """Return the mean loss at the counted positions of a batch."""
    counted = batch.counted > 0
    with settings.autocast():
        with torch.no_grad():
            taught = hidden_states(target, batch.token_ids)[counted]
        drafted = hidden_states(network, batch.token_ids)[counted]
        ones = batch.counted[counted]
        return distil_loss(drafted, network.lm_head.weight, taught, target_head, ones, settings.hard_weight)


# --- evaluation ---------------------------------------------------------------------------------------------------


def evaluate(settings: DraftSettings) -> None:
    """Measure the 8-bit draft on every benchmark and write the report."""
    if draft_form.draft_shape(settings.out) is None:
        raise ConfigError(
            f"there is no draft model in {settings.out}; run the stage 'draft' first, with the same --out"
        )
    target, chat = load_target(settings)
    draft = load_network(settings.out, settings.device)
    torch.manual_seed(settings.seed)
    report: dict[str, Any] = conditions(settings.device)
    report["num_parameters"] = sum(parameter.numel() for parameter in draft.parameters())
    report["acceptance"] = {
        path.stem: _acceptance(target, draft, chat, path, settings) for path in bench_paths(settings.bench)
    }
    keep_report(report, settings)


def keep_report(report: dict[str, Any], settings: RunSettings) -> None:
    """Write the figures of an evaluation."""
    text = json.dumps(report, indent=2) + "\n"
    for path in (settings.report_file, settings.results):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _acceptance(target: Any, draft: Any, chat: PromptFormat, path: Path, settings: DraftSettings) -> dict[str, Any]:
    """Return the figures of one benchmark: for each sampling method, the rounds of each chain length."""
    prompts, found = bench_prompts(path, chat, settings), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        rounds, _ = measure(
            target,
            draft,
            prompts,
            num_new=settings.bench_tokens,
            temperature=temperature,
            stops=chat.stops,
            pad_id=chat.stops[0],
            draft_lengths=DRAFT_LENGTHS,
        )
        found[f"T={temperature:g}"] = rounds
        lengths = {length: figures["mean_accepted_length"] for length, figures in rounds.items()}
        depths = rounds[str(max(DRAFT_LENGTHS))]["acceptance_by_position"]
        click.echo(f"{path.stem} T={temperature:g}: tokens a round by chain {lengths}, accepted by depth {depths}")
    return found
