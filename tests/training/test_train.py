"""`specq train`: methods by table, and one clear line where an earlier stage is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from specq.cli import main
from specq.cli.train import METHODS, SUMMARIES
from specq.runtime import resolve
from specq.training import PAIR_STAGES
from specq.training.optimizer import build_optimizers
from tests.each import each
from tests.training.stages import refusal


@each("name", METHODS)
def test_each_method_has_help(name):
    result = CliRunner().invoke(main, ["train", name, "--help"])

    assert result.exit_code == 0
    assert SUMMARIES[name] in CliRunner().invoke(main, ["train", "--help"]).stdout


ASKED = """
import sys
from click.testing import CliRunner
from specq.cli import main
from specq.cli import train_stages
import os

def stage(*_):
    print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
    raise SystemExit(0)

train_stages.checked = stage
print(CliRunner().invoke(main, ["train", "block", "--target", "tiny", "evaluate"]).output)
"""


@each(("given", "taken"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep_before_torch_is_imported(given, taken):
    """Else they compute while they wait: beside other work, training then takes several times as long."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = kept | ({"OMP_WAIT_POLICY": given} if given else {})
    said = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [taken, "False"]


@each("name", PAIR_STAGES)
def test_each_stage_is_there(name):
    assert resolve("stage", PAIR_STAGES, name).__doc__


@each(
    ("stage", "missing"),
    [("tokenizer", "no *.jsonl.gz shard in"), ("target", "run the stage 'data' first"), ("draft", "'rollouts' first")],
)
def test_what_a_stage_lacks_is_named(stage, missing, tmp_path):
    places = [f"--{name}={tmp_path / name}" for name in ("corpus", "work")]
    assert missing in refusal(CliRunner().invoke(main, ["train", "pair", *places, stage]))


def test_muon_updates_have_the_same_rms_for_any_shape():
    """The root mean square of an update is 0.2 times the rate, within the error of five Newton-Schulz steps."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.Linear(columns, rows, bias=False) for rows, columns in ((256, 256), (688, 256), (64, 192))
    )
    before = [layer.weight.detach().clone() for layer in layers]
    for layer in layers:
        layer.weight.grad = torch.randn_like(layer.weight)
    muon, _ = build_optimizers(torch.nn.ModuleList([*layers, torch.nn.LayerNorm(4)]), lr=0.01, weight_decay=0.0)
    muon.step()

    for layer, start in zip(layers, before, strict=True):
        moved = (layer.weight - start).square().mean().sqrt().item()
        assert moved == pytest.approx(0.2 * 0.01, rel=0.2)
