"""The evaluation of a finished pair, as a dictionary ready for JSON, and the export of its files."""

import datetime as dt
import json
import platform
import shutil
import sys

import torch
import transformers

from train_pair_lib.acceptance import DRAFT_LENGTH, measure_benchmarks
from train_pair_lib.architecture import load_model, weight_bytes
from train_pair_lib.dataset import load_dataset
from train_pair_lib.pretrain import held_out_losses
from train_pair_lib.settings import Settings
from train_pair_lib.vocabulary import load_tokenizer


def hardware_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def evaluate_pair(settings: Settings) -> dict:
    """Evaluate the rounded weights and write the report into the work directory (and to `results`, if given)."""
    tokenizer, dataset = load_tokenizer(settings.tokenizer_folder), load_dataset(settings.dataset_file)
    models = {
        "target": load_model(settings.target_folder, settings.device),
        "draft": load_model(settings.draft_folder, settings.device),
    }
    folders = {"target": settings.target_folder, "draft": settings.draft_folder}
    report = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "hardware": hardware_name(settings.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(sys.argv),
        "draft_shape": settings.draft_shape,
        "draft_length": DRAFT_LENGTH,
        "max_new_tokens": settings.bench_tokens,
    }
    for name, model in models.items():
        losses = held_out_losses(model, dataset, settings, tokenizer.pad_token_id)
        report[name] = {
            "num_parameters": sum(weight.numel() for weight in model.parameters()),
            "weight_bytes": weight_bytes(folders[name]),
            "held_out_loss": {shard: round(loss, 4) for shard, loss in losses.items()},
        }
    report["acceptance"] = measure_benchmarks(models["target"], models["draft"], tokenizer, settings)
    write_report(report, settings)
    return report


def write_report(report: dict, settings: Settings) -> None:
    """Write the report as JSON."""
    text = json.dumps(report, indent=2) + "\n"
    (settings.work / f"results-{settings.draft_shape}.json").write_text(text, encoding="utf-8")
    if settings.results is not None:
        settings.results.parent.mkdir(parents=True, exist_ok=True)
        settings.results.write_text(text, encoding="utf-8")


def export_pair(settings: Settings) -> None:
    """Copy the two model directories to `out`/target and `out`/draft."""
    for source, name in ((settings.target_folder, "target"), (settings.draft_folder, "draft")):
        destination = settings.out / name
        destination.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, destination / file.name)
