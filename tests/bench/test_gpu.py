"""`specq bench gpu` without a GPU."""

import pytest
import torch
from click.testing import CliRunner

from specq.cli import main


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "gpu", *map(str, arguments)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_so(tmp_path):
    """Before anything is made or started."""
    outcome = bench("--only", "own", "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "device cuda is not available" in outcome.stderr
    assert not (tmp_path / "pair").exists()


def test_a_device_that_is_none_is_refused(tmp_path):
    outcome = bench("--device", "nope", "--only", "own", "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "device is 'nope'; available to torch" in outcome.stderr
