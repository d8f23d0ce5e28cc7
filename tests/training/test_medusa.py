"""`specq train medusa` makes heads for `tiny` that load, fit and are measured, from a corpus of a few lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from specq.drafting.medusa import form as medusa_form
from specq.drafting.medusa.network import load_heads
from specq.engines.torch import load_network
from specq.testing.checkpoints_heads import change_heads, heads_logits
from specq.training.foresight import BEYOND, UNKNOWN, among_first, count_rounds
from specq.training.medusa import HeadsNetwork, save_heads
from tests.each import each
from tests.training.stages import SMALL, TARGET, check_it_goes_on, learn, losses, runner, tiny_info

pytestmark = pytest.mark.timeout(180)
run = runner("medusa", [*SMALL, "--num-heads=2"])


def test_all_stages_make_heads_that_fit_their_target(places, output):
    heads = load_heads(str(places["out"]), str(TARGET), tiny_info(), "cpu")
    assert heads.num_heads == 2
    assert len(heads.token_ids) > 1
    assert "rollouts: 7 of 7 prompts" in output
    assert "loss by head" in output


@pytest.mark.usefixtures("output")
def test_the_report_says_what_was_foreseen(places):
    figures = json.loads((places["work"] / "results.json").read_text())["acceptance"]["figs"]
    assert set(figures) == {"T=0", "T=0.8"}
    for found in figures.values():
        assert 1 <= found["chain"]["mean_accepted_length"] <= found["tree"]["mean_accepted_length"] <= 3
        assert len(found["among_first"]["10"]) == 2


@pytest.mark.usefixtures("output")
def test_a_run_that_was_cut_off_goes_on(places):
    check_it_goes_on(run, places, "heads", "--seed=3")


@pytest.mark.slow
def test_heads_learn(tmp_path):
    """What comes two places later; with matrices of their own, too."""
    for option in ("shared-output", "own-output"):
        (tmp_path / option).mkdir()
        said = learn(run, tmp_path / option, "--seconds=2", f"--{option}", "heads", step_s=0.1)
        assert losses(said, "head")[0] < 3
        form = medusa_form.heads_shape(tmp_path / option / "out")
        assert (form.medusa_num_heads, form.hidden_size) == (2, 256)


@pytest.mark.usefixtures("output")
def test_heads_of_another_target_are_not_evaluated(places, tmp_path):
    for file in places["out"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_heads(tmp_path, tokenizer_hash="b" * 64)
    result = run({**places, "out": tmp_path}, "evaluate")
    assert (result.exit_code, "trained for another tokenizer" in result.stderr) == (2, True)


@each("own_output", [False, True])
def test_what_is_written_says_what_was_trained(tmp_path, own_output):
    """The loaded heads say what the trained network does, but for 8 bits."""
    torch.manual_seed(0)
    target = load_network(TARGET, torch.device("cpu"))
    ids = np.arange(0, 4000, 7, dtype=np.int32)
    output = target.lm_head.weight[torch.from_numpy(ids).long()]
    network = HeadsNetwork(3, 2, output, own_output=own_output)
    hidden = torch.randn(4, 256)
    torch.testing.assert_close(network.logits(2, hidden), hidden @ output.T)  # they begin as the target's own
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.05)
    shape = medusa_form.HeadsShape(3, 2, 256, tiny_info().num_tokens, tiny_info().tokenizer_hash)

    save_heads(network, shape, ids, tmp_path)

    heads = load_heads(str(tmp_path), str(TARGET), tiny_info(), "cpu")
    trained = torch.stack([network.logits(head, hidden) for head in range(3)], 1).detach()
    torch.testing.assert_close(heads.logits(hidden), trained, atol=0.1, rtol=0.05)
    plain = heads_logits(tmp_path, hidden, None if own_output else target.lm_head.weight.detach())
    torch.testing.assert_close(heads.logits(hidden), plain, atol=1e-3, rtol=1e-3)


def test_rounds_are_played_with_chains_and_trees():
    """By hand: token p's state says of the tokens after it; a tree of width 4 has paths whose product of (rank + 1) is
    at most 4."""
    ranks = np.array([[0, 1], [2, 0], [0, 0], [3, UNKNOWN], [0, BEYOND], [BEYOND, BEYOND]])  # six tokens, two heads
    chain = count_rounds([ranks], 1)
    # from 0: one right; from 2: two; from 5 nothing is left
    assert chain.accepted_counts == (1, 2)
    assert chain.num_new_tokens == 5
    tree = count_rounds([ranks], 4)
    assert tree.accepted_counts == (2, 1)  # from 0: (0, 1); from 3: (3,), and a token that is not known
    assert count_rounds([ranks[4:]], 4).full_round_counts == ()  # the end of the text cut it short
    assert among_first([ranks])["1"] == [0.6, 0.5]
    assert among_first([ranks])["3"] == [0.8, 0.75]
