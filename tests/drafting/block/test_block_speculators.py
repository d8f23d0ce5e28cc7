"""Block drafters in the form of the library `speculators`: the same drafts as in DFlash's form, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.form import block_shape
from specq.drafting.block.network import load_block
from specq.drafting.head_files import input_matrix, output_matrix
from specq.drafting.head_kinds import kind_of
from specq.drafting.speculators_form import target_of
from specq.protocol import BLOCK, ConfigError, ModelInfo
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_block import as_block_of_speculators, block_logits, block_shape_of, make_block
from specq.testing.checkpoints_eagle import change_head
from specq.verifier.sources import Followed
from tests.replaying import StandIn

HIDDEN, LAYERS, LENGTH = 64, (0, 2), 20
INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "a" * 64)
SHAPE = block_shape_of(HIDDEN, VOCAB, LAYERS, norms_states=False, mask_token_id=7, rope_theta=700.0)
KNOWN = [0, 3, 4, 17, 40, 41, 98]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose output matrix is not its embedding."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("target"))


def said_by(heads: Path, target: Path, end: int = LENGTH, *, is_recorded: bool = False) -> torch.Tensor:
    """Return the logits of a block behind the first tokens of a text, of the drafter's own choice of layers.

    States of a layer are random, and the same for each drafter that reads this layer.
    """
    head = BlockHead(load_block(str(heads), str(target), INFO, "cpu"), StandIn() if is_recorded else None)
    head.observe(states(head.layers), [Followed(0, 1, tokens()[1:end], range(end - 1))])
    return head.logits_of([0])[0]


def states(layers: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(one)) for one in layers], 1)


def tokens() -> list[int]:
    found: list[int] = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(9)).tolist()
    return found


def by_hand(heads: Path, target: Path, end: int = LENGTH) -> torch.Tensor:
    """The same by plain arithmetic."""
    shape, matrices = block_shape(heads), (input_matrix(target), output_matrix(target))
    return block_logits(heads, shape, states(LAYERS)[: end - 1], tokens()[end - 1], matrices)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("token_ids", [None, KNOWN], ids=["all tokens", "some tokens"])
def test_it_says_the_same_as_in_the_form_of_dflash(
    tmp_path: Path, target: Path, token_ids: list[int] | None, kind: str
) -> None:
    """Its layers have norms of heads, even if their config is a Llama's."""
    ours, theirs = make_block(tmp_path / "ours", SHAPE, token_ids), make_block(tmp_path / "theirs", SHAPE)
    as_block_of_speculators(theirs, target, token_ids, layer={"model_type": kind})
    assert (kind_of(theirs).source, target_of(theirs), target_of(ours)) == (BLOCK, str(target), "")
    assert torch.equal(said_by(theirs, target), said_by(ours, target))
    torch.testing.assert_close(said_by(theirs, target), by_hand(ours, target), atol=2e-4, rtol=1e-4)
    found, expected = (load_block(str(one), str(target), INFO, "cpu") for one in (theirs, ours))
    assert found.limit_vocab == expected.limit_vocab
    assert np.array_equal(found.token_ids, expected.token_ids) if token_ids else found.token_ids is None


def test_the_output_matrix_of_some_tokens_is_its_own(tmp_path: Path, target: Path) -> None:
    """Of all tokens it is the target's, whatever the file has, as is the embedding."""
    own = {"lm_head.weight": torch.randn(len(KNOWN), HIDDEN, generator=torch.Generator().manual_seed(1))}
    made = as_block_of_speculators(make_block(tmp_path / "some", SHAPE), target, KNOWN)
    change_head(made, own)
    torch.testing.assert_close(said_by(made, target), by_hand(made, target), atol=2e-4, rtol=1e-4)
    padded = load_block(str(made), str(target), replace(INFO, num_tokens=KNOWN[-1]), "cpu")
    assert padded.token_ids is not None
    assert padded.token_ids.tolist() == KNOWN[:-1]
    assert torch.equal(padded.network.get_buffer("output"), own["lm_head.weight"][:-1])
    whole = as_block_of_speculators(make_block(tmp_path / "all", SHAPE), target)
    expected = said_by(whole, target)
    change_head(whole, {name: torch.ones(VOCAB, HIDDEN) for name in ("lm_head.weight", "embed_tokens.weight")})
    assert torch.equal(said_by(whole, target), expected)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("end", [2, 4, 5, LENGTH])
def test_a_sliding_window_is_that_of_plain_arithmetic(
    tmp_path: Path, target: Path, end: int, is_causal: bool, is_recorded: bool
) -> None:
    """Texts shorter than the window, as long, and longer."""
    made = make_block(tmp_path, SHAPE)
    as_block_of_speculators(made, target, layer=dict(SLIDING), sliding_window_non_causal=not is_causal)
    assert (block_shape(made).windows, block_shape(made).is_causal) == ((3, 0), is_causal)
    found = said_by(made, target, end, is_recorded=is_recorded)
    torch.testing.assert_close(found, by_hand(made, target, end), atol=2e-4, rtol=1e-4)


def refused(heads: Path, target: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_block(str(heads), str(target), INFO, "cpu")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"aux_hidden_state_layer_ids": [1, 4]}, "behind layers 0, 3; the target has only layers 0 to 2"),
        (
            {"aux_hidden_state_layer_ids": [0, 2]},
            r"is \[0, 2\], but must be one or more layers, ascending, counted from 1",
        ),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None, but must be"),
        (
            {"speculators_model_type": "dflash2"},
            r"is 'dflash2' \(DFlash 2\); of the library .* reads 'eagle3', 'peagle' and 'dflash'",
        ),
        ({"speculators_model_type": "dspark"}, r"is 'dspark' \(DSpark\); .* and block drafters must be 'dflash'"),
        (
            {"markov_rank": 4},
            "config.json: markov_rank is 4; drafters of the method 'dflash' have no such key, but block",
        ),
        ({"sample_from_anchor": True}, "sample_from_anchor is True; block drafters are computed with False"),
        ({"mask_token_id": None}, "mask_token_id is None, but must be a token id"),
        ({"mask_token_id": VOCAB}, "mask_token_id is 99; the embedding of target has only 99 rows"),
        ({"block_size": None}, "block_size is None, but must be a whole number from 2 to 64"),
        ({"draft_vocab_size": None}, "draft_vocab_size is None; a block drafter needs a whole number"),
        (
            {"draft_vocab_size": 8},
            r"lm_head.weight has the shape \(7, 64\), and should have \(8, 64\)|d2t has the shape",
        ),
        ({"transformer_layer_config": None}, "of the type NoneType, but must be an object"),
        (
            {"layer": {"model_type": "gemma3"}},
            "model_type is 'gemma3'; block drafters are computed with llama or qwen3",
        ),
        ({"layer": {"hidden_size": 32}}, "takes hidden states of size 32; those of target have 64"),
        ({"layer": {"vocab_size": 80}}, "is for a vocabulary of 80 tokens; target has 99"),
        ({"layer": {"attention_bias": True}}, "attention_bias is True; block drafters"),
        (
            {"layer": {"layer_types": ["chunked_attention"] * 2}},
            "is 'chunked_attention'; block drafters are computed with",
        ),
        (
            {"layer": {"num_hidden_layers": 2**31 - 1}},
            "num_hidden_layers is 2147483647; a block drafter has at most 1024 layers",
        ),
        ({"layer": {"layer_types": 2}}, "the type of layer_types is 'int'; block drafters are computed with 'list'"),
        ({"layer": {"layer_types": ["full_attention"]}}, "the number of layer_types is 1; .* with 2"),
        (
            {"layer": {**SLIDING, "sliding_window": None}},
            "sliding_window is None; a block drafter needs a whole number",
        ),
        ({"layer": {**SLIDING, "use_sliding_window": False}}, "use_sliding_window is False; block drafters"),
        (
            {"layer": {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}},
            "rope_parameters has sliding_attention; block drafters rotate alike in all layers",
        ),
        (
            {"layer": {"rope_parameters": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor is 0.5; block drafters",
        ),
    ],
)
def test_an_almost_known_form_is_refused(tmp_path: Path, target: Path, config: dict[str, Any], match: str) -> None:
    refused(as_block_of_speculators(make_block(tmp_path, SHAPE), target, KNOWN, **config), target, match)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": torch.zeros(7)}, "d2t is float32, and should be int64 or int32"),
        ({"d2t": -torch.arange(7)}, "d2t must contain ascending token ids within the vocabulary, 0 to 98"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "d2t and t2d contain different tokens"),
        ({"markov.weight": torch.zeros(2)}, "it has markov.weight, which block drafters have not"),
        ({"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}, r"has the shape \(64, 192\), and should have \(64, 128\)"),
    ],
)
def test_a_file_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, target: Path, tensors: dict[str, Any], match: str
) -> None:
    made = as_block_of_speculators(make_block(tmp_path, SHAPE), target, KNOWN)
    change_head(made, tensors)
    refused(made, target, match)
