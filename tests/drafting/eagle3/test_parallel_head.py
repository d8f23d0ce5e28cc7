"""P-EAGLE heads in the form of the library `speculators`: their drafts, whatever the history, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specq.drafting.block.remote import BlockTrees
from specq.drafting.block.spec import load_head
from specq.drafting.eagle3.form import eagle_shape
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.parallel import PEagleHead
from specq.drafting.head_kinds import kind_of
from specq.drafting.speculators_form import target_of
from specq.drafting.trees import texts as module
from specq.drafting.trees.interface import TreeRequest
from specq.engines.torch.engine import TorchEngine
from specq.protocol import BF16, BLOCK, ConfigError, ModelInfo, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import change_head, eagle_shape_of, make_parallel, parallel_logits
from specq.verifier.sources import Followed
from tests.devices import NEEDS_CUDA
from tests.drafting.eagle3.plain_eagle import on_gpu
from tests.drafting.eagle3.test_eagle_remote import made, served, texts
from tests.drafting.medusa.test_medusa import tiny
from tests.replaying import StandIn

__all__ = ["tiny"]  # a fixture

HIDDEN, LAYERS, KNOWN = 40, (0, 1, 2), 23
INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "a" * 64)
SHAPE = eagle_shape_of(HIDDEN, VOCAB, KNOWN, layers=LAYERS, num_layers=3, num_places=4, mask_token_id=7)
SHAPES = {
    "several layers": SHAPE,
    "one layer, all tokens": replace(SHAPE, num_layers=1, draft_vocab_size=VOCAB, norm_before_residual=True),
    "head norms, one place": replace(SHAPE, num_layers=2, num_places=1, has_head_norms=True),
}
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


class Text:
    """A random text and the target's hidden states of its rows."""

    def __init__(self, seed: int, length: int = 40) -> None:
        random = torch.Generator().manual_seed(seed)
        self.states = torch.randn(length, 3 * HIDDEN, generator=random)
        self.tokens = torch.randint(0, VOCAB, (length + 1,), generator=random).tolist()

    def part(self, session_id: int, first: int, end: int) -> Followed:
        """Return the tokens at these positions, each with the row of the position before it."""
        return Followed(session_id, first, self.tokens[first:end], range(first - 1, end - 1))

    def logits(self, heads: Path, end: int, first: int = 1) -> torch.Tensor:
        """Return what plain arithmetic predicts behind the first tokens, with rows from a position on."""
        return parallel_logits(
            heads, eagle_shape(heads), self.states[first - 1 : end - 1], self.tokens[first:end], first
        )


def head_of(heads: Path, target: Path, kind: str = "as needed") -> PEagleHead:
    eagle = load_eagle(str(heads), str(target), INFO, "cpu")
    if kind == "on a GPU":
        return PEagleHead(on_gpu(eagle))
    return PEagleHead(eagle, StandIn() if kind == "recorded" else None)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("most_rows", [1, 4, 512])
@pytest.mark.parametrize("kind", ["as needed", "recorded", pytest.param("on a GPU", marks=NEEDS_CUDA)])
def test_blocks_are_those_of_plain_arithmetic(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, shape: Any, most_rows: int, kind: str
) -> None:
    """Several texts of different lengths in one pass, that grow by any number of tokens; one begins late, or again
    after a gap. Drafts leave no trace."""
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    made = make_parallel(tmp_path, shape, str(target))
    head, read = head_of(made, target, kind), [Text(seed) for seed in range(3)]
    spans = {0: (1, 9), 1: (1, 4), 2: (5, 7)}
    for known in ({0: 9, 1: 4, 2: 7}, {0: 10, 2: 12}, {1: 5, 0: 17}):
        for i, end in known.items():
            first = spans[i][0] if head.known(i) == 0 else head.known(i)
            head.observe(read[i].states, [read[i].part(i, first, end)])
        request = TreeRequest(list(known), [GREEDY] * len(known), 4, None, -torch.inf, most=6)
        grown = head.start([request])[0].collect()
        found = head.logits_of(list(known)).cpu()
        for tree, (own, (i, end)) in enumerate(zip(found, known.items(), strict=True)):
            expected = read[i].logits(made, end, spans[i][0])
            torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-4)
            best = int(expected[0].argmax())
            assert grown.token_ids[tree, 0] == (best if head.token_ids is None else head.token_ids[best])
    head.observe(read[0].states, [read[0].part(0, 20, 24)])
    torch.testing.assert_close(head.logits_of([0])[0].cpu(), read[0].logits(made, 24, 20), atol=2e-4, rtol=1e-4)


def test_later_rounds_record_nothing(tmp_path: Path, target: Path) -> None:
    """No session waits for a recording, as its text grows within the usual room."""
    head, text = head_of(make_parallel(tmp_path, SHAPE, str(target)), target, "recorded"), Text(1, 400)
    head.warm_up(2)
    before = head.num_recorded
    assert before > 0
    for end in (5, 6, 9, 60, 61, 250):
        head.observe(text.states, [text.part(i, head.known(i) or 1, end) for i in range(2)])
        head.start([TreeRequest([0, 1], [GREEDY] * 2, 4, None, -torch.inf, most=6)])[0].collect()
    assert head.num_recorded == before


def test_a_random_head_changes_no_text(tiny: str, tmp_path: Path) -> None:
    """In a draft worker, ahead of the verdicts and in rounds, several jobs at once."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    shape = eagle_shape_of(256, info.vocab_size, 300, layers=(1, 5, 8), num_layers=2, num_places=4, mask_token_id=3)
    about = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    heads = make_parallel(tmp_path, replace(shape, **about), tiny)
    plain, engine = texts(served(made(tiny))), made(tiny)
    world = served(engine)
    world.add_drafter(b"d0", BlockTrees(load_head(str(heads), tiny, info, "cpu"), engine.info, form=BF16, window=512))
    drafted = texts(world)
    assert [job.token_ids for job in drafted] == [job.token_ids for job in plain]
    assert sum(int(str(job.stats["draft_tokens"])) for job in drafted) > 20


def test_it_is_described(tmp_path: Path, target: Path) -> None:
    heads = make_parallel(tmp_path, SHAPE, str(target))
    assert (kind_of(heads).source, target_of(heads)) == (BLOCK, str(target))
    assert kind_of(heads).describe(heads, target, INFO) == "a P-EAGLE head of 4 tokens on layers 0, 1, 2"


def refused(heads: Path, target: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_head(str(heads), str(target), INFO, "cpu")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "this P-EAGLE head reads .* layers 0, 1, 3; the target has"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "an EAGLE-3 head whose config.json names no layers needs"),
        ({"mask_token_id": None}, "mask_token_id is None, but must be a token id"),
        ({"mask_token_id": VOCAB}, "mask_token_id of this P-EAGLE head is 99; its embedding has only 99 rows"),
        ({"norm_output": True}, "norm_output is True; P-EAGLE heads are computed without"),
        ({"markov_rank": 4}, "markov_rank is 4; drafters of the method 'peagle' have no such key, but norm_before_r"),
        ({"target_hidden_size": 32}, "hidden states of size 32; those of target have 40"),
        ({"layer": {"vocab_size": 80}}, "is for a vocabulary of 80 tokens; target has 99"),
        ({"layer": {"attention_bias": True}}, "attention_bias is True; P-EAGLE heads are computed with False"),
        ({"layer": {"layer_types": ["sliding_attention"] * 3}}, "layer_types is .*; P-EAGLE heads are computed with"),
        ({"layer": {"model_type": "gemma3"}}, "model_type is 'gemma3'; P-EAGLE heads are computed with llama or qwen3"),
        ({"speculators_config": {}}, "speculative_tokens .* is None; P-EAGLE heads need a whole number from 1 to 64"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 65}]}},
            "speculative_tokens .* is 65; P-EAGLE heads need a whole number from 1 to 64",
        ),
        ({"layer": {"num_hidden_layers": 4}}, "layers.3.* is missing"),
        ({"layer": {"num_hidden_layers": 2**31 - 1}}, "is 2147483647; a P-EAGLE head has at most 1024 layers"),
    ],
)
def test_an_almost_known_form_is_refused(tmp_path: Path, target: Path, config: dict[str, Any], match: str) -> None:
    refused(make_parallel(tmp_path, SHAPE, str(target), **config), target, match)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"mask_hidden": None}, "mask_hidden is missing"),
        ({"mask_hidden": torch.zeros(1, 1, 3)}, r"mask_hidden has the shape \(1, 1, 3\), and should have \(1, 1, 120"),
        ({"layers.2.mlp.up_proj.weight": None}, "layers.2.mlp.up_proj.weight is missing"),
        ({"layers.3.mlp.up_proj.weight": torch.zeros(2)}, "it has layers.3.mlp.up_proj.weight, which P-EAGLE"),
        ({"d2t": None}, "d2t is missing"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, target: Path, tensors: dict[str, Any], match: str
) -> None:
    made = make_parallel(tmp_path, SHAPE, str(target))
    change_head(made, tensors)
    refused(made, target, match)
