"""`specq bench gpu` without a GPU, and chains of draft steps on the CPU."""

import pytest
import torch
from click.testing import CliRunner

from bench import chain_steps
from specq.cli import main
from specq.models import resolve_model
from specq.proposers import PROPOSERS


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "gpu", *map(str, arguments)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_so(tmp_path):
    """Before anything is made or started."""
    outcome = bench("--only", "own", "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "no device cuda is here" in outcome.stderr
    assert not (tmp_path / "pair").exists()


def test_a_device_that_is_none_is_refused(tmp_path):
    outcome = bench("--device", "nope", "--only", "own", "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "device is 'nope'; torch has here" in outcome.stderr


def test_chains_are_timed():
    """A step in a chain is what deeper chains take more, for each level."""
    drafter = PROPOSERS.resolve("draft-model").make(resolve_model("tiny", "draft"), device="cpu", kv_slots=1024)
    both = chain_steps.measure(drafter, 1, context=8, width=2)
    assert both["step_ms"] == pytest.approx((both["chain_ms"][10] - both["chain_ms"][2]) / 8, abs=2e-3)
