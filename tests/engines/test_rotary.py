"""Rotary scaling: a kind is served with transformers' own logits in every text that fits, or the checkpoint is refused
by its name.

The reference is transformers' pass over the whole text, alone and without a cache. Ours computes the same text alone
and beside a text as long as any, at once and in parts, and as a draft behind its first half; at each length around
those where kinds change.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from specq.engines.native.rotary import frequencies, rotary_tables
from specq.engines.native.rows import RowPacker
from specq.engines.torch import rotary
from specq.engines.torch.loading import load
from specq.engines.torch.native import NativeTorchForward
from specq.protocol.errors import ConfigError
from specq.testing.checkpoints import load_reference, make_checkpoint, random_tokens, reference_logits

TRAINED, LONGEST, SLOTS = 24, 80, 400
LENGTHS = (2, TRAINED, TRAINED + 1, 64, LONGEST)
FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]  # of the 8 frequencies of a head of 16
PLAIN = {"rope_theta": 100.0}  # so that all frequencies matter in a short text
_LONG = {"rope_type": "longrope", **PLAIN, "short_factor": FACTORS, "original_max_position_embeddings": TRAINED}
_SCALED = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
_LLAMA3 = {"rope_type": "llama3", **PLAIN, **_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SERVED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **PLAIN},
    "linear": {"rope_type": "linear", **PLAIN, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", **PLAIN, "factor": 4.0},  # changes where no text is: max_position_embeddings
    "llama3": _LLAMA3,
    "yarn": {"rope_type": "yarn", **PLAIN, **_SCALED},
    "yarn, an attention factor": {"rope_type": "yarn", **PLAIN, **_SCALED, "attention_factor": 0.7},
    "yarn, mscale": {"rope_type": "yarn", **PLAIN, **_SCALED, "mscale": 1.4, "mscale_all_dim": 0.6, "truncate": False},
    "proportional": {"rope_type": "proportional", **PLAIN, "partial_rotary_factor": 0.5},
    "longrope, one factor": {**_LONG, "long_factor": FACTORS, "factor": 4.0},
    "longrope, trained in full": {**_LONG, "long_factor": FACTORS[::-1], "original_max_position_embeddings": LONGEST},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "longrope": (
        {**_LONG, "long_factor": FACTORS[::-1], "factor": 4.0},
        r"rotary scaling of the kind 'longrope' has other frequencies for longer texts",
    ),
    "unknown": ({"rope_type": "figs", **PLAIN}, "scaling is of the kind 'figs'; transformers has default, linear"),
    "a part of a head": (
        {"rope_type": "linear", **PLAIN, "factor": 2.0, "partial_rotary_factor": 0.5},
        "'linear' gives 8 cosines for the 16 values of a head",
    ),
}


def checkpoint(folder: Path, **rope: Any) -> Path:
    """Save a random Llama with this rotary scaling."""
    path = make_checkpoint("llama", folder) / "config.json"
    said = json.loads(path.read_text()) | {"max_position_embeddings": LONGEST, "rope_parameters": rope}
    path.write_text(json.dumps(said))
    return folder


def ways(forward: Any, token_ids: list[int], other: list[int]) -> dict[str, torch.Tensor]:
    """Return the logits behind a text by each way of computing it, [vocab]; `other` is as long as a text may be."""
    size, half = len(token_ids), len(token_ids) // 2
    table, others = np.arange(size, dtype=np.int32), np.arange(LONGEST, 2 * LONGEST, dtype=np.int32)
    parts = sorted({0, half, size - 1, size})

    def run(*chains: tuple[list[int], np.ndarray, int], drafts: bool = False) -> torch.Tensor:
        packer = RowPacker()
        for tokens, slots, start in chains:
            packer.add_session(slots)
            packer.add_chain(tokens, slots[start : start + len(tokens)].tolist(), start, judged=True)
            for i in range(half, size) if drafts else ():
                packer.add_node(token_ids[i], int(slots[i]), i, half, slots[half : i + 1].tolist())
        return forward(packer.pack()).logits

    found = {"alone": run((token_ids, table, 0))[0]}
    found["beside"] = run((token_ids, table, 0), (other, others, 0))[0]
    for start, end in itertools.pairwise(parts):  # the other text is computed with each part, and with none before
        logits = run((token_ids[start:end], table, start), (other, others, 0))
    found["in parts"] = logits[0]
    if half:
        run((other, others, 0))
        found["drafted"] = run((token_ids[:half], table, 0), drafts=True)[-1]
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "portable"])
def test_every_kind_that_is_served_has_transformers_logits_at_every_length(tmp_path, eager):
    assert {kind["rope_type"] for kind in SERVED.values()} >= {"default", *ROPE_INIT_FUNCTIONS}, "a kind is not tested"
    rng, num_compared = np.random.default_rng(0), 0
    other = random_tokens(rng, LONGEST).tolist()
    for number, (name, rope) in enumerate(SERVED.items()):
        folder = checkpoint(tmp_path / str(number), **rope)
        loaded = load(str(folder), device="cpu", kv_slots=SLOTS, eager=eager)
        assert isinstance(loaded.forward, NativeTorchForward) is (not eager and rope["rope_type"] in rotary.TABLE_TYPES)
        assert loaded.info.max_length == LONGEST
        reference = load_reference(folder)
        for length in LENGTHS:
            token_ids = random_tokens(rng, length).tolist()
            expected = reference_logits(reference, token_ids)
            for way, logits in ways(loaded.forward, token_ids, other).items():
                assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4), (name, length, way)
                num_compared += 1
    assert num_compared == len(SERVED) * len(LENGTHS) * 4


@pytest.mark.parametrize(("rope", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_the_others_are_refused_by_their_names(tmp_path, rope, said):
    with pytest.raises(ConfigError, match=said):
        load(str(checkpoint(tmp_path, **rope)), device="cpu", kv_slots=SLOTS)


def test_longrope_without_the_rule_would_be_wrong(tmp_path, monkeypatch):
    """The reason for the rule: what a text says would depend on the length of its neighbours."""
    monkeypatch.setattr(rotary, "reason_against", lambda *_: "")
    folder = checkpoint(tmp_path, **REFUSED["longrope"][0])
    rng = np.random.default_rng(1)
    forward = load(str(folder), device="cpu", kv_slots=SLOTS).forward
    found = ways(forward, random_tokens(rng, 20).tolist(), random_tokens(rng, LONGEST).tolist())
    assert (found["alone"] - found["beside"]).abs().max() > 0.01


def _static(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    return 0.5 / 100.0 ** (torch.arange(0, config.head_dim, 2, device=device) / config.head_dim), 1.1


def _stretched(module: Any, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies that fall by and by in texts of more than 37 tokens."""
    last = max(int(positions.max()), 36)
    angles = (positions[..., None] * module.inv_freq).repeat(1, 1, 2) * 36 / last
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def test_kinds_that_come_later_are_judged_by_what_they_compute(tmp_path, monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "later", _static)
    folder = checkpoint(tmp_path, rope_type="later", **PLAIN)
    token_ids = random_tokens(np.random.default_rng(2), 40).tolist()
    forward = load(str(folder), device="cpu", kv_slots=SLOTS).forward
    expected = reference_logits(load_reference(folder), token_ids)
    for logits in ways(forward, token_ids, token_ids * 2).values():
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", _stretched)
    with pytest.raises(ConfigError, match="kind 'later' has other frequencies"):
        load(str(folder), device="cpu", kv_slots=SLOTS)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    ],
    ids=lambda said: said["rope_type"],
)
def test_the_tables_of_integer_arithmetic_are_near_those_of_transformers(said):
    """They are computed in NumPy, with cosines of our own."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=said)
    module = modeling_llama.LlamaRotaryEmbedding(config)
    expected = [table[0, :, :32].double().numpy() for table in module(torch.zeros(1), torch.arange(2048)[None])]
    of, factor = frequencies(said, 64, None)
    tables = rotary_tables(of, factor, 2048)
    for ours, theirs in zip(tables, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)  # transformers' angles are rounded to float32
    angles = np.arange(2048)[:, None] * of
    for ours, theirs in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(ours, factor * theirs, atol=1e-7)


def test_tables_are_exact_far_out_and_near_whole_turns():
    of = np.array([1.0, np.float32(np.pi / 2), np.float32(1e-5)], np.float64)
    cosines, sines = rotary_tables(of, 1.0, 131072)
    angles = np.arange(131072)[:, None] * of
    np.testing.assert_allclose(cosines, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sines, np.sin(angles), atol=1e-7)
