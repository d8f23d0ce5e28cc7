"""The stages of `specq train medusa2`, each a function of the settings: Medusa-2, heads and target trained together, which makes another target.

rollouts   as of `specq train draft`: the target answers prompts of the corpus
heads      as of `specq train medusa`: the heads warm up, the target stays as it is
joint      both are trained on the target's own answers, by self-distillation (Cai et al. 2024, arXiv 2401.10774, sections 2.2.2 and 2.3.2): the loss is
           the divergence of the new target's distribution from the original's, so that it goes on saying nearly the same, and `heads_weight`
           times that of the heads, which learn what the new target says. Heads and target have rates of their own. A run that was cut off goes on
evaluate   how many of the new target's tokens the heads foresee, and how far it went from the original one

The target is changed by matrices of low rank (`low_rank`): the original is the same model without them, so it needs no memory of its own; what a
run keeps is small; and they bound how far the target can go. In the end they are part of its matrices, so that serving it costs what the
original costs. Its embedding and output matrix stay as they are, since heads share them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.utils.logging import disable_progress_bar

from specq.checkpoints import read_json, read_text
from specq.engines.torch import load_heads
from specq.protocol import ConfigError
from specq.text import load_tokenizer_files
from specq.training import medusa
from specq.training.architecture import hidden_states
from specq.training.distil import Batch, divergences, rollout_batches
from specq.training.draft import all_rollouts, check_rollouts, load_target
from specq.training.draft_settings import JointSettings
from specq.training.drift import measure_drift
from specq.training.foresight import info_of, measure_heads
from specq.training.low_rank import Adapters
from specq.training.medusa_evaluation import MedusaForesight
from specq.training.medusa_network import HeadsNetwork, save_heads
from specq.training.runs import Run, depth_weights, load_trained

__all__ = ["evaluate", "train_jointly", "warm_up"]

WARM_UP_HEADS = "warm-up-heads"  # within the folder of a run
GENERATION = "generation_config.json"


class JointNetwork(nn.Module):
    """What is trained: heads, and the changes of the target that they are for."""

    def __init__(self, heads: HeadsNetwork, adapters: Adapters) -> None:
        super().__init__()
        self.heads, self.adapters = heads, adapters


def warm_up(settings: JointSettings) -> None:
    """Train the heads alone."""
    _check_out(settings)
    medusa.train_heads(replace(settings, seconds=settings.warm_up_seconds, out=settings.work / WARM_UP_HEADS))


def train_jointly(settings: JointSettings) -> None:
    """Train heads and target together, from heads that are warm; write both to `out`."""
    _check_out(settings)
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    check_rollouts(rollouts, settings.target, target, settings.num_heads + 1, f"{settings.num_heads} heads")
    heads, output, token_ids = medusa.new_heads(settings, target, rollouts)
    about = medusa.about(settings, token_ids)
    if not load_trained(heads, settings.state_file, about, settings.device):
        raise ConfigError(
            f"there are no heads of these settings and rollouts in {settings.state_file}; run the stage 'heads' first"
        )
    network = JointNetwork(heads, Adapters(target, settings.rank))
    num_changes = sum(p.numel() for p in network.adapters.parameters())
    click.echo(f"{num_changes / 1e6:.2f} M parameters change the target; {rollouts.num_answered} labels")
    own = settings.rank, settings.backbone_lr, settings.heads_weight
    run = Run(network, _optimizers(network, settings), settings.joint_file, f"medusa2 {about} {own}")
    run.resume(settings.device)
    batches = rollout_batches(rollouts, settings, chat.stops[0], np.random.default_rng([settings.seed, run.step]))
    weights = [settings.heads_weight * weight for weight in depth_weights(settings.depth_decay, settings.num_heads)]
    run.fit(
        lambda: joint_losses(network, target, output, next(batches), settings),
        [1.0, *weights],
        settings.seconds,
        "part (target, heads)",
    )
    network.adapters.merge()
    save_target(target, settings.target, settings.name, settings.new_target)
    rounded, _ = load_target(replace(settings, target=settings.new_target))
    fingerprint = info_of(rounded, settings.new_target).fingerprint
    shape = replace(medusa.heads_shape(settings, target), target_fingerprint=fingerprint)
    save_heads(heads, shape, token_ids, settings.new_heads)
    click.echo(f"serve them by: specq up --model {settings.new_target} --heads {settings.new_heads}")


def _check_out(settings: JointSettings) -> None:
    """Raise ConfigError where the new target would overwrite the original one."""
    if settings.new_target.resolve() == settings.target.resolve():
        raise ConfigError(
            f"the new target would be written over the original one, {settings.target}; name another folder by --out"
        )


def _optimizers(network: JointNetwork, settings: JointSettings) -> list[torch.optim.Optimizer]:
    changes = torch.optim.AdamW(network.adapters.parameters(), lr=settings.backbone_lr, weight_decay=0.0)
    for group in changes.param_groups:
        group["peak_lr"] = group["lr"]
    return [*medusa.heads_optimizers(network.heads, settings), changes]


def joint_losses(
    network: JointNetwork, target: Any, output: torch.Tensor, batch: Batch, settings: JointSettings
) -> torch.Tensor:
    """Return f32[1 + heads]: the divergence KL(original || new target) in nats a token, and the mean loss of each head, over the places of a
    batch at which the original speaks."""
    is_said = batch.counted > 0  # [rows, length]: the next token is the target's own
    with settings.autocast():
        with torch.no_grad(), network.adapters.off():
            original = target.lm_head(hidden_states(target, batch.token_ids)[is_said])  # [n, vocab]
        hidden = hidden_states(target, batch.token_ids)[is_said]  # [n, hidden]
        said = target.lm_head(hidden)
        taught = functional.linear(hidden.detach(), output)  # [n, columns]
        by_head = medusa.losses_by_head(network.heads, hidden, taught, is_said, settings.hard_weight)
    logs = [functional.log_softmax(logits.float(), -1) for logits in (original, said)]
    divergence = divergences(*logs).mean()
    return torch.cat([divergence[None], by_head])


# --- the new target ---------------------------------------------------------------------------------------------------------


def save_target(network: Any, original: Path, name: str, folder: Path) -> None:
    """Write a changed target in bfloat16, in Hugging Face layout, with all else from the original; each file is there only when it is whole,
    and config.json last."""
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    nn.Module.to(network, torch.bfloat16).save_pretrained(unfinished, max_shard_size="1TB")
    config = read_json(original, "config.json")
    config.pop("quantization_config", None)
    config |= {"_name_or_path": name, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    texts = {**load_tokenizer_files(original), GENERATION: read_text(original, GENERATION)}
    for file, text in texts.items():
        if text is not None:
            (unfinished / file).parent.mkdir(exist_ok=True)
            (unfinished / file).write_text(text, encoding="utf-8")
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    written = [path.relative_to(unfinished) for path in unfinished.rglob("*") if path.is_file()]
    for path in sorted(written, key=lambda path: path.name == "config.json"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / path).replace(folder / path)
    shutil.rmtree(unfinished)


# --- evaluation -------------------------------------------------------------------------------------------------------------


def evaluate(settings: JointSettings) -> None:
    """Measure the new target and the heads, as they were written, on every benchmark, and write the report."""
    if not (settings.new_target / "config.json").is_file():
        raise ConfigError(
            f"there is no target in {settings.new_target}; run the stage 'joint' first, with the same --out"
        )
    new = replace(settings, target=settings.new_target, out=settings.new_heads)
    target, chat = load_target(new)
    info = info_of(target, new.target)
    heads = load_heads(str(new.out), str(new.target), info, str(new.device))
    original, _ = load_target(settings)
    besides = {"name": settings.name, "drift": measure_drift(original, target, chat, settings)}
    del original
    measure_heads(target, MedusaForesight(target, heads), chat, new, besides=besides)
