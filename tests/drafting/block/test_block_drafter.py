"""A block drafter by plain arithmetic, whatever the history of its texts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from specq.drafting.block.arrays import load_arrays
from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.form import block_shape, is_block
from specq.drafting.block.network import load_block
from specq.drafting.head_files import input_matrix, output_matrix
from specq.drafting.head_kinds import kind_of
from specq.drafting.rank_trees import tree_for
from specq.drafting.trees import texts as module
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.protocol import BLOCK, EAGLE, MEDUSA, ConfigError, ModelInfo, SamplingParams, Speculation
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_block import block_logits, block_shape_of, make_block
from specq.testing.checkpoints_eagle import change_head, eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import make_published
from specq.verification.sampling import perturbed_scores
from specq.verifier.sources import Followed
from tests.devices import NEEDS_CUDA
from tests.replaying import StandIn

HIDDEN, LAYERS = 64, (0, 2)
INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "a" * 64)
SHAPE = block_shape_of(HIDDEN, VOCAB, LAYERS)
KNOWN = [0, 3, 4, 17, 40, 41, 98]
PUBLISHED = replace(SHAPE, norms_states=False, mask_token_id=7)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose output matrix is not its embedding."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("target"))


def loaded(heads: Path, target: Path, info: ModelInfo = INFO) -> BlockHead:
    return BlockHead(load_block(str(heads), str(target), info, "cpu"))


class Text:
    """A random text and the target's hidden states of its rows."""

    def __init__(self, seed: int, length: int = 40) -> None:
        random = torch.Generator().manual_seed(seed)
        self.states = torch.randn(length, len(LAYERS) * HIDDEN, generator=random) * 3
        self.tokens = torch.randint(0, VOCAB, (length + 1,), generator=random).tolist()

    def part(self, session_id: int, first: int, end: int) -> Followed:
        """Return the tokens at these positions, each with the row of the position before it."""
        return Followed(session_id, first, self.tokens[first:end], range(first - 1, end - 1))

    def logits(self, made: Path, target: Path, end: int, first: int = 1) -> torch.Tensor:
        """Return what plain arithmetic says behind the first tokens, with features from a position on."""
        shape, taps = block_shape(made), self.states[first - 1 : end - 1]
        matrices = input_matrix(target), output_matrix(target)
        return block_logits(made, shape, taps, self.tokens[end - 1], matrices, first)


@pytest.mark.parametrize("shape", [SHAPE, PUBLISHED], ids=["own", "as published"])
@pytest.mark.parametrize("most_rows", [1, 4, 512])
def test_blocks_are_those_of_plain_arithmetic(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, shape: Any, most_rows: int
) -> None:
    """Several texts of different lengths in one pass, that grow by any number of tokens; one begins late, or again
    after a gap."""
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    made = make_block(tmp_path, shape, None if shape is PUBLISHED else KNOWN)
    head, texts = loaded(made, target), [Text(seed) for seed in range(3)]
    spans = {0: (1, 9), 1: (1, 4), 2: (5, 7)}
    for known in ({0: 9, 1: 4, 2: 7}, {0: 10, 2: 12}, {1: 5, 0: 17}):
        for i, end in known.items():
            first = spans[i][0] if head.known(i) == 0 else head.known(i)
            head.observe(texts[i].states, [texts[i].part(i, first, end)])
        found = head.logits_of(list(known))
        for own, (i, end) in zip(found, known.items(), strict=True):
            expected = texts[i].logits(made, target, end, spans[i][0])
            torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-4)
    head.observe(texts[0].states, [texts[0].part(0, 20, 24)])
    torch.testing.assert_close(head.logits_of([0])[0], texts[0].logits(made, target, 24, 20), atol=2e-4, rtol=1e-4)


def test_a_rejected_draft_leaves_no_trace(tmp_path: Path, target: Path) -> None:
    """Blocks that were drafted before do not change the next one; a text that is forgotten begins anew."""
    made, text, other = make_block(tmp_path, SHAPE), Text(1), Text(2)
    drafted, quiet = loaded(made, target), loaded(made, target)
    for end in (5, 6, 9, 14):
        for head in (drafted, quiet):
            head.observe(text.states, [text.part(0, head.known(0) or 1, end)])
        drafted.start([asked([0], [GREEDY])])[0].collect()
    torch.testing.assert_close(drafted.logits_of([0]), quiet.logits_of([0]), atol=1e-5, rtol=1e-5)
    for _ in range(5):
        drafted.close(0)
        drafted.observe(other.states, [other.part(0, 1, 3)])
    assert drafted.cache.rows.shape[1] == 2, "a closed text leaves its place"
    drafted.close(0)
    drafted.observe(other.states, [other.part(0, 1, 5)])
    torch.testing.assert_close(drafted.logits_of([0])[0], other.logits(made, target, 5), atol=2e-4, rtol=1e-4)


def asked(session_ids: Sequence[int], params: Sequence[SamplingParams], **others: Any) -> TreeRequest:
    return TreeRequest(session_ids, params, SHAPE.num_places, None, -np.inf, most=6)._replace(**others)


def test_tokens_are_ranked_by_the_targets_noise(tmp_path: Path, target: Path) -> None:
    """Each place by the noise of its position; at temperature 0, and where the verifier draws, by the logits alone."""
    made, text = make_block(tmp_path, SHAPE, KNOWN), Text(5)
    head = loaded(made, target)
    drawn = replace(SAMPLED, strategy="probabilistic")
    for i in range(3):
        head.observe(text.states, [text.part(i, 1, 8)])
    grown = head.start([asked(range(3), [GREEDY, SAMPLED, drawn])])[0].collect()
    logits = text.logits(made, target, 8).numpy()
    for tree, params in enumerate((GREEDY, SAMPLED, GREEDY)):
        scores = logits if params is GREEDY else perturbed(logits, params)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        chain, node = [], -1
        for place in range(SHAPE.num_places):
            children = np.flatnonzero((grown.parents[tree] == node) & (grown.depths == place))
            node = int(children[grown.reach[tree, children].argmax()])
            chain.append(int(grown.token_ids[tree, node]))
            assert grown.scores[tree, node] == pytest.approx(logs[place].max(), abs=1e-3)
            if place == 1:
                break  # deeper first choices need not be among so few nodes
        assert chain == [KNOWN[i] for i in scores.argmax(-1).tolist()][: len(chain)]


def perturbed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    return np.stack(
        [
            perturbed_scores(row[None], [params], [8 + place], np.array(KNOWN, np.int32))[0]
            for place, row in enumerate(logits)
        ]
    )


# --- recorded passes ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", pytest.param("on a GPU", marks=NEEDS_CUDA)])
def recorded(request: pytest.FixtureRequest, tmp_path: Path, target: Path) -> BlockHead:
    drafter = load_block(str(make_block(tmp_path, SHAPE, KNOWN)), str(target), INFO, "cpu")
    if request.param == "stand-in":
        return BlockHead(drafter, StandIn())
    network = deepcopy(drafter.network).cuda()
    network.fuse()
    return BlockHead(replace(drafter, network=network))


def same(found: Grown, expected: Grown) -> None:
    """Both have the same likely nodes."""
    for tree in range(len(expected.reach)):
        ours, theirs = (
            {tuple(line_of(one, tree, i)): one.reach[tree, i] for i in range(one.reach.shape[1])}
            for one in (found, expected)
        )
        likely = [line for line, reach in theirs.items() if reach > np.sort(list(theirs.values()))[len(theirs) // 2]]
        assert {line: ours[line] for line in likely} == pytest.approx({line: theirs[line] for line in likely}, abs=2e-3)


def line_of(grown: Grown, tree: int, node: int) -> list[int]:
    above = int(grown.parents[tree, node])
    return [*(line_of(grown, tree, above) if above >= 0 else []), int(grown.token_ids[tree, node])]


def test_recorded_passes_draft_the_same(recorded: BlockHead, tmp_path: Path, target: Path) -> None:
    """For any history, number of texts and length, with sampling that the device can rank and that it cannot; in the
    shapes that were recorded, until memory moves."""
    plain, texts = loaded(tmp_path, target), [Text(seed, 700) for seed in range(5)]
    recorded.warm_up(4)
    cut, shape = replace(SAMPLED, top_k=3), tree_for(Speculation(tree=((0, 1), (11,))), 4)
    rounds: list[tuple[dict[int, int], SamplingParams, dict[str, Any]]] = [
        ({0: 9}, GREEDY, {}),
        ({0: 10, 1: 20, 2: 300}, SAMPLED, {}),
        ({1: 24, 2: 301}, cut, {}),
        ({0: 690, 3: 5}, SAMPLED, {"ranks": shape}),
        ({0: 691, 1: 25, 2: 302, 3: 6, 4: 7}, GREEDY, {"level_sizes": (2, 2)}),
    ]
    for ends, params, others in rounds:
        for head in (plain, recorded):
            for i, end in ends.items():
                head.observe(texts[i].states, [texts[i].part(i, head.known(i) or 1, end)])
        mixed = [params if i % 2 else GREEDY for i in ends]
        request = asked(list(ends), mixed, **others)
        same(recorded.start([request])[0].collect(), plain.start([request])[0].collect())
    requests = [asked([0, 1], [GREEDY, SAMPLED]), asked([4], [cut])]
    for ours, theirs in zip(recorded.start(requests), plain.start(requests), strict=True):
        same(ours.collect(), theirs.collect())


def test_later_rounds_record_nothing(recorded: BlockHead) -> None:
    """A session waits for no recording, as its text grows within the usual room. Moved memory is recorded anew."""
    text, long = Text(1, 400), Text(2, 1100)
    recorded.warm_up(2)
    assert recorded.num_recorded > 0
    before = recorded.num_recorded
    for end in (5, 6, 9, 60, 61, 250):
        recorded.observe(text.states, [text.part(i, recorded.known(i) or 1, end) for i in range(2)])
        recorded.start([asked([0, 1], [GREEDY, SAMPLED])])[0].collect()
    assert recorded.num_recorded == before
    recorded.observe(long.states, [long.part(2, 1, 1100)])
    recorded.start([asked([2], [GREEDY])])[0].collect()
    before = recorded.num_recorded
    recorded.start([asked([0, 1], [GREEDY, SAMPLED])])[0].collect()
    assert recorded.num_recorded == before + 1


def test_kernels_that_do_not_run_are_done_without(tmp_path: Path, target: Path) -> None:
    """It is said once, at the start; blocks are those of torch then."""
    made = make_block(tmp_path, SHAPE, KNOWN)
    head, plain, text = (
        BlockHead(load_block(str(made), str(target), INFO, "cpu"), StandIn()),
        loaded(made, target),
        Text(1),
    )

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such instruction")

    head._passes._kernels = SimpleNamespace(states=fail)
    with structlog.testing.capture_logs() as logs:
        head.warm_up(2, lambda _: [(2, 2)])
    assert [entry["event"] for entry in logs] == ["head_kernels_failed"]
    recorded = head.num_recorded
    for one in (head, plain):
        one.observe(text.states, [text.part(0, 1, 9)])
    request = asked([0], [GREEDY], level_sizes=(2, 2))
    same(head.start([request])[0].collect(), plain.start([request])[0].collect())
    assert head.num_recorded == recorded


# --- files ------------------------------------------------------------------------------------------------------------


def refused(heads: Path, target: Path, match: str, info: ModelInfo = INFO) -> None:
    """Both loaders refuse it, with the same words."""
    with pytest.raises(ConfigError, match=match):
        load_arrays(str(heads), str(target), info)


def test_a_shape_is_read_as_it_was_written(tmp_path: Path) -> None:
    for i, shape in enumerate((SHAPE, PUBLISHED, replace(SHAPE, num_tokens=VOCAB, tokenizer_hash="a" * 64))):
        assert block_shape(make_block(tmp_path / str(i), shape)) == shape


def test_kinds_of_heads_are_told_apart(tmp_path: Path) -> None:
    """By config.json alone."""
    made = {
        BLOCK: make_block(tmp_path / "block", SHAPE),
        EAGLE: make_eagle(tmp_path / "eagle", eagle_shape_of(HIDDEN, VOCAB, 20, layers=(0, 1, 2))),
        MEDUSA: make_published(tmp_path / "medusa", HIDDEN, VOCAB),
    }
    assert {name: kind_of(path).source for name, path in made.items()} == {name: name for name in made}
    assert not is_block(tmp_path / "nowhere")


def test_a_drafter_for_another_target_is_refused(tmp_path: Path, target: Path) -> None:
    other = replace(SHAPE, num_tokens=VOCAB, tokenizer_hash="b" * 64)
    wrong = {
        "takes hidden states of size 32; those of target have 64": block_shape_of(32, VOCAB, LAYERS),
        "is for a vocabulary of 80 tokens; target has 99": block_shape_of(HIDDEN, 80, LAYERS),
        r"trained for another tokenizer \(99 tokens, bbbb": other,
        "behind layers 0, 3; the target has only layers 0 to 2": block_shape_of(HIDDEN, VOCAB, (0, 3)),
        "mask_token_id is 200; the embedding of target has only 99 rows": replace(PUBLISHED, mask_token_id=200),
        "has rows of size 32; the embedding of target has": replace(
            block_shape_of(32, VOCAB, LAYERS), target_hidden_size=HIDDEN
        ),
    }
    for i, (match, shape) in enumerate(wrong.items()):
        refused(make_block(tmp_path / str(i), shape), target, match)
    refused(tmp_path / "nowhere", target, "the directory .*nowhere of a block drafter does not exist")
    refused(make_block(tmp_path / "ids", SHAPE, [3, 3, 4]), target, "lm_head.token_ids must ascend within")
    refused(make_block(tmp_path / "high", SHAPE, [3, VOCAB]), target, "within the vocabulary, 0 to 98")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_size": 1}, "block_size is 1, but must be a whole number from 2 to 64: the anchor and the masks"),
        ({"block_size": 65}, "block_size is 65, but must be"),
        ({"block_size": None}, "block_size is None, but must be"),
        ({"model_type": "llama"}, "model_type is 'llama'; block drafters are computed with 'qwen3'"),
        ({"attention_bias": True}, "attention_bias is True; block drafters are computed with False"),
        ({"layer_types": ["sliding_attention"] * 2}, "'sliding_attention'; block drafters are computed with 'full_att"),
        (
            {"speculators_model_type": "dflash"},
            "transformer_layer_config is of the type NoneType, but must be an object",
        ),
        ({"dflash_config": None, "architectures": ["DFlashDraftModel"]}, "its config.json has no object dflash_config"),
        (
            {"dflash_config": {"target_layer_ids": [2, 1]}},
            r"is \[2, 1\], but must be one or more layers",
        ),
        ({"dflash_config": {"target_layer_ids": []}}, "must be one or more layers, ascending"),
        ({"dflash_config": {}}, "target_layer_ids is None"),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": -1}},
            "mask_token_id is -1, but must be a token id",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 2], "fc_layernorm": True}}, "fc_layernorm is True; block drafters"),
        ({"num_hidden_layers": 3}, r"layers.2.self_attn.q_norm.weight is missing \(11 tensors are\)"),
        ({"num_hidden_layers": 1}, "it has layers.1.input_layernorm.weight, which block drafters have not"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a block drafter needs a whole number"),
        ({"layer_types": 7}, "the type of layer_types is 'int'; block drafters are computed with 'list'"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; a block drafter has at most 1024 layers"),
        (
            {"block_size": [1] * 100_000},
            r"^.{0,300}block_size is \[1, 1, .{0,90}\.\.\. \(100000 entries\), but must be",
        ),
        ({"num_key_value_heads": 3}, "4 attention heads of size 8 cannot share 3 key-value heads"),
    ],
)
def test_an_almost_known_form_is_refused(tmp_path: Path, target: Path, changes: dict[str, Any], match: str) -> None:
    """With what is wrong, and what would be right."""
    made = make_block(tmp_path, SHAPE)
    change_head(made, **changes)
    if changes == {"block_size": None}:
        said = json.loads((made / "config.json").read_text())
        assert "block_size" not in said
    refused(made, target, match)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (
            {"fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            r"has the shape \(64, 64\), and should have \(64, 128\)",
        ),
        ({"mask_embedding": None}, "mask_embedding is missing"),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "norm.weight is int32, and should be float32"),
        ({"norm.weight": torch.full((HIDDEN,), torch.nan)}, "values that are not finite, in norm.weight"),
        ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, "it has lm_head.weight, which block drafters have not"),
        ({"lm_head.token_ids": torch.zeros(3)}, "lm_head.token_ids is float32, and should be int32"),
    ],
)
def test_a_file_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, target: Path, tensors: dict[str, Any], match: str
) -> None:
    made = make_block(tmp_path, SHAPE)
    change_head(made, tensors)
    refused(made, target, match)
