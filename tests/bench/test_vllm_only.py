"""`specq bench vllm-only` with a toy in vLLM's place, and its weights of four bits, which are unpacked one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specq.bench import vllm_only
from specq.bench.gpu.four_bit import HIGHEST, pack, quantise
from specq.bench.suites.vllm_only import stretched
from specq.testing.checkpoints import make_checkpoint
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine


def unpacked(tensors: dict[str, torch.Tensor], name: str) -> list[list[float]]:
    """The weight as `compressed-tensors` reads it: eight values of four bits in a word, the first lowest, 8 stands for zero."""
    words, scales = tensors[f"{name}.weight_packed"].tolist(), tensors[f"{name}.weight_scale"].tolist()
    outputs, inputs = tensors[f"{name}.weight_shape"].tolist()
    found = []
    for row in range(outputs):
        values = [(word % 2**32 >> 4 * place) % 16 - 8 for word in words[row] for place in range(8)]
        group = inputs // len(scales[row])
        found.append([value * scales[row][i // group] for i, value in enumerate(values)])
    return found


@pytest.mark.parametrize("group", [0, 16])
def test_four_bits_are_the_nearest_of_fifteen_values(group: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    tensors = pack("a", weight, group)
    scales = tensors["a.weight_scale"].repeat_interleave(group or 32, 1)
    assert tuple(tensors["a.weight_packed"].shape) == (6, 4)
    error = (torch.tensor(unpacked(tensors, "a")) - weight).abs()
    assert bool((error <= scales / 2 + 1e-6).all())
    assert float((weight.abs() / scales).max()) == pytest.approx(HIGHEST)


def test_a_checkpoint_keeps_all_but_its_linear_layers(tmp_path) -> None:
    source = make_checkpoint("llama-bf16", tmp_path / "whole")
    quantise(source, tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    packed = {name for name in tensors if name.endswith("weight_packed")}
    assert {name.rsplit(".", 2)[1] for name in packed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert "model.embed_tokens.weight" in tensors
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert config["hidden_size"] == json.loads((source / "config.json").read_text())["hidden_size"]


def prompts(count: int) -> list[np.ndarray]:
    return [np.arange(3 + i, 9 + i, dtype=np.int32) for i in range(count)]


def test_texts_are_held_against_the_rivals(monkeypatch) -> None:
    """Alone and together, they are all there; one that differs says where, and whether that was a near tie."""
    service = vllm_only.Service(ToyEngine(), 64)
    own = [service.open(i, prompt, 7) for i, prompt in enumerate(prompts(3))]
    service.run()
    theirs = [
        {"token_ids": list(text.token_ids), "best": [[(token, 5.0), (0, 1.0)] for token in text.token_ids]}
        for text in own
    ]
    theirs[1]["token_ids"][4] += 1
    said, wanted = own[2].token_ids[3], own[2].token_ids[3] + 1
    theirs[2]["token_ids"][3], theirs[2]["best"][3] = wanted, [(wanted, 5.0), (said, 4.96875)]
    monkeypatch.setattr(vllm_only, "load", lambda *_, **__: ToyEngine())
    monkeypatch.setattr(vllm_only, "completed", lambda *_: theirs)
    found = vllm_only.quantised("toy", prompts(3), 7, 64, {}, "bfloat16")
    for way in ("alone", "together"):
        assert [found[way][name] for name in ("texts", "equal", "near_ties", "unexplained")] == [3, 1, 1, 1]
        assert found[way]["largest_gap"] == 0.03125
        places = [(one["text"], one["token"], one["near_tie"]) for one in found[way]["differing"]]
        assert places == [(1, 4, False), (2, 3, True)]


def test_a_prefix_is_shared_and_the_texts_are_one() -> None:
    found, texts = vllm_only.shared_prefix(ToyEngine(), np.arange(3, 43, dtype=np.int32), 5, 64, 4)
    assert found["prompt"] == 40
    assert 0 <= found["cached"] < 40
    assert {name: len(own) for name, own in texts.items()} == {"first": 1, "cached, alone": 1, "cached, together": 4}
    assert {len(text) for own in texts.values() for text in own} == {5}
    assert len({tuple(text) for own in texts.values() for text in own}) == 1


@pytest.mark.parametrize("slowdown", [0.0, 1.8])
def test_short_texts_go_on_beside_a_long_prompt(slowdown: float) -> None:
    engine, prompt = ToyEngine(), np.arange(200, dtype=np.int32) % 40 + 3
    curve = vllm_only.measured_curve(engine, 16)()
    found = vllm_only.long_prompt(engine, curve, prompt, prompts(3), 16, slowdown)
    asked = [found[name] for name in ("prompt", "sessions", "rows", "slowdown")]
    assert asked == [200, 3, 16, slowdown]
    assert found["p99_to_median"] >= 1
    assert found["first_ms"] > 0
    assert found["steps"] >= 200 // (16 - 3) - 1


def test_a_service_that_ends_leaves_the_engine_to_the_next_one() -> None:
    """Nothing of it is in flight any more: the part with a long prompt serves twice with one engine."""
    engine, said = LateEngine(), []
    for _ in range(2):
        service = vllm_only.Service(engine, 64)
        texts = [service.open(i, prompt, 50) for i, prompt in enumerate(prompts(3))]
        while not all(len(text.token_ids) > 4 for text in texts):
            service.must_step()
        assert engine.flights
        said.append([text.token_ids[:4] for text in texts])
        service.close()
        assert not engine.flights
        assert not engine.contexts
    assert said[0] == said[1]


def test_a_model_takes_longer_contexts(tmp_path) -> None:
    """Another number in its config; the rest are the same files."""
    source = make_checkpoint("llama-bf16", tmp_path / "whole")
    before = json.loads((source / "config.json").read_text())
    with stretched(str(source), 99_999) as longer:
        config = json.loads((Path(longer) / "config.json").read_text())
        assert config == before | {"max_position_embeddings": 99_999}
        assert (Path(longer) / "model.safetensors").samefile(source / "model.safetensors")
    assert json.loads((source / "config.json").read_text()) == before
