"""Heads that vLLM loads: what would let it draft nothing, or end its process on a GPU, is found before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specq.drafting.head_kinds import check_for_engine
from specq.protocol import ConfigError
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_block import as_block_of_speculators, block_shape_of, make_block
from specq.testing.checkpoints_eagle import as_speculators, change_head, eagle_shape_of, make_eagle

HIDDEN, LAYERS = 64, (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("target"))


def eagle(directory: Path, known: int = 23) -> Path:
    return make_eagle(directory, eagle_shape_of(HIDDEN, VOCAB, known, layers=LAYERS))


def block(directory: Path, mask_token_id: int = 7) -> Path:
    shape = block_shape_of(HIDDEN, VOCAB, LAYERS, norms_states=False, mask_token_id=mask_token_id)
    return make_block(directory, shape)


def check(heads: Path, target: Path) -> None:
    """Check as the verifier does."""
    check_for_engine(str(heads), str(target), "target", reads_values=True)


def refused(heads: Path, target: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(heads, target)


def test_heads_that_fit_pass(tmp_path: Path, target: Path) -> None:
    """In each form that vLLM reads, and with less or more than specq asks for where it computes them itself."""
    made = [eagle(tmp_path / "eagle"), block(tmp_path / "block")]
    made.append(as_speculators(eagle(tmp_path / "eagle of speculators"), str(target)))
    made.append(as_block_of_speculators(block(tmp_path / "block of speculators"), target, [0, 3, 98]))
    shared = eagle(tmp_path / "the target's output matrix", VOCAB)
    change_head(shared, {"lm_head.weight": None, "rotary.inv_freq": torch.ones(4)})
    quantised = eagle(tmp_path / "quantised")
    change_head(
        quantised, {"fc.weight": torch.zeros(8, 8, dtype=torch.int8)}, quantization_config={"quant_method": "x"}
    )
    for heads in (*made, shared, quantised):
        check(heads, target)


def test_heads_may_be_in_several_files(tmp_path: Path, target: Path) -> None:
    heads = eagle(tmp_path)
    tensors = load_file(heads / "model.safetensors")
    names = sorted(tensors)
    for i, own in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in own}, heads / f"model-0000{i}-of-00002.safetensors")
    (heads / "model.safetensors").unlink()
    check(heads, target)
    (heads / "model-00001-of-00002.safetensors").unlink()
    refused(heads, target, r"its safetensors lack .* tensors are missing\)")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"fc.weight": None}, r"heads: its safetensors lack fc.weight \(1 tensors are missing\)"),
        ({"midlayer.mlp.down_proj.weight": None}, "lack midlayer.mlp.down_proj.weight"),
        ({"d2t": None}, "lack d2t"),
        ({"d2t": torch.full((23,), 10**9)}, "d2t names tokens from 1000000000 to 1000000022, but .* from 0 to 98"),
        ({"d2t": torch.full((23,), -1)}, "d2t names tokens from -1 to 21, but"),
        (
            {"fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            r"fc.weight has the shape \(64, 64\), and should have \(64, 192\)",
        ),
        (
            {"norm.weight": torch.full((HIDDEN,), torch.nan)},
            "has values that are not finite, in norm.weight of an EAGLE",
        ),
        ({"norm.weight": torch.full((HIDDEN,), torch.inf, dtype=torch.bfloat16)}, "not finite, in norm.weight"),
    ],
)
def test_an_eagle_head_that_is_not_whole_is_refused(
    tmp_path: Path, target: Path, tensors: dict[str, Any], match: str
) -> None:
    heads = eagle(tmp_path / "heads")
    change_head(heads, tensors)
    refused(heads, target, match)


def test_a_block_drafter_that_is_not_whole_is_refused(tmp_path: Path, target: Path) -> None:
    heads = block(tmp_path / "missing")
    change_head(heads, {"layers.1.mlp.down_proj.weight": None})
    refused(heads, target, r"lack layers.1.mlp.down_proj.weight \(1 tensors are missing\), .*copy all files of a block")
    refused(block(tmp_path / "mask", VOCAB), target, "mask_token_id is 99, but must be a token id .* 0 to 98")
    few = as_block_of_speculators(block(tmp_path / "few"), target, [0, 3, 98])
    change_head(few, {"lm_head.weight": None})
    refused(few, target, "lack lm_head.weight")


def test_a_half_written_directory_is_refused(tmp_path: Path, target: Path) -> None:
    heads = eagle(tmp_path)
    file = heads / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(heads, target, "model.safetensors cannot be read as safetensors; it may be truncated")
    file.unlink()
    refused(heads, target, r"has a config.json of an EAGLE-3 head, but no \*.safetensors")


def test_a_target_whose_sizes_are_elsewhere_is_left_to_vllm(tmp_path: Path, target: Path) -> None:
    """As in a model for images, whose config.json has them in an object of its own."""
    said = json.loads((target / "config.json").read_text())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"model_type": "images", "text_config": said}))
    check(eagle(tmp_path / "heads"), tmp_path / "target")
