"""Inflated heads say for an inflated target what the small ones say for the small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specq.drafting.block.form import block_shape
from specq.drafting.block.network import load_block
from specq.drafting.eagle3.form import eagle_shape
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.head_files import output_matrix
from specq.drafting.medusa.network import load_heads
from specq.models import Shape
from specq.models.inflate import write
from specq.models.inflate_heads import write_heads
from specq.protocol import ConfigError, ModelInfo
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint
from specq.testing.checkpoints_block import as_block_of_speculators, block_logits, block_shape_of, make_block
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import make_heads, make_published
from specq.testing.checkpoints_mtp import QWEN, add_mtp
from tests.each import each

HIDDEN = 40  # of the small target, which has 3 layers
LARGE = Shape(96, 5, 12, 3, 32, 144, 150, tied=False)
TEXT = [5, 9, 33, 7, 61, 2, 80]
HASH = "a" * 64


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(small, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    write(small, directory, LARGE, dtype="float32", device="cpu")
    return directory


def states(target: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What stands behind each layer, and the last state, normed: f32[rows, hidden]."""
    network, found = load_reference(target), []
    for layer in network.model.layers:
        layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output[0]))
    with torch.inference_mode():
        last = network.model(torch.tensor([TEXT])).last_hidden_state[0]
    return found, last


def info(vocab: int) -> ModelInfo:
    return ModelInfo("target", "", "", "torch", vocab, VOCAB, (), 600, HASH)


def said_by_eagle(heads: Path, target: Path, vocab: int) -> tuple[torch.Tensor, list[int]]:
    """What a head says behind each token of the text, [rows, columns], and of its first tokens by its own states; and
    its tokens."""
    head = load_eagle(str(heads), str(target), info(vocab), "cpu")
    network, (behind, _) = head.network, states(target)
    taps = torch.cat([behind[layer] for layer in head.layers], -1)
    mask = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()

    def attend(queries, keys, values):
        moved = (part.transpose(1, 2) for part in (queries, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    given, found = network.project(taps)[None], []
    for _ in range(2):  # from the target's states, then from the head's own
        given = network(
            given, torch.tensor([TEXT]), network.rotations(torch.arange(len(TEXT))[None], given.dtype), attend
        )
        found.append(network.logits(given)[0])
    assert head.token_ids is not None
    return torch.cat(found), head.token_ids.tolist()


@each(("norm_before_residual", "has_head_norms"), [(False, False), (True, True)])
def test_an_eagle_head_says_the_same(tmp_path, small, large, norm_before_residual, has_head_norms):
    """From the target's hidden states and from its own, of the same tokens, for any layer names of vLLM."""
    norms = {"norm_before_residual": norm_before_residual, "has_head_norms": has_head_norms}
    shape = eagle_shape_of(HIDDEN, VOCAB, 17, layers=(0, 1, 2), **norms)
    heads = make_eagle(tmp_path / "small", shape, embedding=False)
    made = write_heads(heads, small, tmp_path, LARGE, device="cpu", dtype="float32")
    assert made == tmp_path / "eagle3"
    expected, tokens = said_by_eagle(heads, small, VOCAB)
    found, same_tokens = said_by_eagle(made, large, LARGE.vocab)
    assert same_tokens == tokens
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    said = eagle_shape(made)
    assert (said.hidden_size, said.intermediate_size, said.head_dim) == (
        LARGE.hidden,
        LARGE.intermediate,
        LARGE.head_dim,
    )
    assert (said.num_attention_heads, said.num_key_value_heads) == (LARGE.heads, LARGE.kv_heads)
    assert (said.vocab_size, said.draft_vocab_size, said.layers) == (LARGE.vocab, 17, (0, 1, 2))
    assert json.loads((made / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


@each("own_matrices", [False, True])
def test_medusa_heads_say_the_same(tmp_path, small, large, own_matrices):
    """With the target's output matrix, of some tokens, or with matrices of their own."""
    heads = tmp_path / "small"
    if own_matrices:
        make_published(heads, HIDDEN, VOCAB)
    else:
        make_heads(heads, HIDDEN, tokenizer=(VOCAB, HASH), head_size=30)
    made = write_heads(heads, small, tmp_path, LARGE, device="cpu", dtype="float32")
    before, after = (
        load_heads(str(directory), str(target), info(vocab), "cpu")
        for directory, target, vocab in ((heads, small, VOCAB), (made, large, LARGE.vocab))
    )
    expected, found = (one.logits(states(target)[1]) for one, target in ((before, small), (after, large)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert after.blocks[0][0].shape[1:] == (LARGE.hidden, LARGE.hidden)
    if not own_matrices:
        assert after.token_ids.tolist() == before.token_ids.tolist()


@each(("norms_states", "mask_token_id", "token_ids"), [(True, None, [3, 5, 60]), (False, 7, None)])
def test_a_block_drafter_says_the_same(tmp_path, small, large, norms_states, mask_token_id, token_ids):
    shape = block_shape_of(HIDDEN, VOCAB, (0, 2), norms_states=norms_states, mask_token_id=mask_token_id)
    heads = make_block(tmp_path / "small", shape, token_ids)
    made = write_heads(heads, small, tmp_path, LARGE, device="cpu", dtype="float32")
    found = []
    for directory, target in ((heads, small), (made, large)):
        model, taps = load_reference(target).model, torch.cat([states(target)[0][layer] for layer in (0, 2)], -1)
        output = output_matrix(target)
        found.append(
            block_logits(directory, block_shape(directory), taps, 12, (model.embed_tokens.weight.data, output))
        )
    expected, said = (one if token_ids else one[:, :VOCAB] for one in found)
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
    loaded = load_block(str(made), str(large), info(LARGE.vocab), "cpu")
    assert loaded.network.shape == block_shape(made)
    assert (None if loaded.token_ids is None else loaded.token_ids.tolist()) == token_ids
    assert (loaded.network.shape.num_places, loaded.network.shape.hidden_size) == (4, LARGE.hidden)


def test_heads_that_cannot_be_inflated_are_refused(tmp_path, small):
    own = make_eagle(tmp_path / "own", eagle_shape_of(HIDDEN, VOCAB, 17, layers=(0, 1, 2)), embedding=True)
    block = make_block(tmp_path / "block", block_shape_of(HIDDEN, VOCAB, (0, 2), mask_token_id=7))
    with pytest.raises(ConfigError, match="in the form of DFlash's authors or of `specq train block`"):
        write_heads(as_block_of_speculators(block, small), small, tmp_path / "large", LARGE)
    with pytest.raises(ConfigError, match="only an EAGLE-3 head of its target's hidden size and embedding"):
        write_heads(own, small, tmp_path, LARGE)
    itself = add_mtp(make_checkpoint("llama", tmp_path / "mtp"), QWEN)
    with pytest.raises(ConfigError, match="contains an MTP layer; only an EAGLE-3 head, a block drafter, Medusa head"):
        write_heads(itself, itself, tmp_path / "large", LARGE)
    narrow = Shape(24, 5, 12, 3, 32, 144, 150, tied=False)
    with pytest.raises(ConfigError, match="hidden=24 is less than these heads' 40"):
        write_heads(make_published(tmp_path / "medusa", HIDDEN, VOCAB), small, tmp_path, narrow)
