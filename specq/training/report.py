"""The evaluation of a finished pair, as a dictionary ready for JSON, and the export of its files."""

import datetime as dt
import json
import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specq.training.acceptance import DRAFT_LENGTH, measure_benchmarks
from specq.training.architecture import load_model, weight_bytes
from specq.training.dataset import load_dataset
from specq.training.pretrain import held_out_losses
from specq.training.settings import PairSettings
from specq.training.vocabulary import load_tokenizer


def hardware_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def evaluate_pair(settings: PairSettings) -> dict[str, Any]:
    """Evaluate the rounded weights and write the report into the work directory (and to `results`, if given)."""
    tokenizer = load_tokenizer(settings.tokenizer_folder)
    target, draft = (load_model(folder, settings.device) for folder in (settings.target_folder, settings.draft_folder))
    report = conditions(settings.device)
    report |= {
        "draft_shape": settings.draft_shape,
        "draft_length": DRAFT_LENGTH,
        "max_new_tokens": settings.bench_tokens,
    }
    report["target"] = _figures(target, settings.target_folder, tokenizer, settings)
    report["draft"] = _figures(draft, settings.draft_folder, tokenizer, settings)
    report["acceptance"] = measure_benchmarks(target, draft, tokenizer, settings)
    write_report(report, settings)
    return report


def conditions(device: torch.device) -> dict[str, Any]:
    """Return when, on what and by which command figures are measured."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "hardware": hardware_name(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": shlex.join(["specq", *sys.argv[1:]]),
    }


def _figures(
    model: LlamaForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerFast, settings: PairSettings
) -> dict[str, Any]:
    """Return the size of a model and its losses on held-out documents."""
    losses = held_out_losses(model, load_dataset(settings.dataset_file), settings, tokenizer.pad_token_id)
    return {
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "weight_bytes": weight_bytes(folder),
        "held_out_loss": {shard: round(loss, 4) for shard, loss in losses.items()},
    }


def write_report(report: dict[str, Any], settings: PairSettings) -> None:
    """Write the report as JSON."""
    text = json.dumps(report, indent=2) + "\n"
    (settings.work / f"results-{settings.draft_shape}.json").write_text(text, encoding="utf-8")
    if settings.results is not None:
        settings.results.parent.mkdir(parents=True, exist_ok=True)
        settings.results.write_text(text, encoding="utf-8")


def export_pair(settings: PairSettings) -> None:
    """Copy the two model directories to `out`/target and `out`/draft."""
    for source, name in ((settings.target_folder, "target"), (settings.draft_folder, "draft")):
        destination = settings.out / name
        destination.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, destination / file.name)
