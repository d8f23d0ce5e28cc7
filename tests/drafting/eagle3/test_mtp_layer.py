"""MTP layers inside checkpoints, in three layouts: their drafts by plain arithmetic, their texts, and refusals."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specq.config import MTP, TargetConfig
from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.host import HostEagle
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.mtp_form import is_mtp, is_usable, loading_bytes, mtp_layer
from specq.drafting.eagle3.remote import EagleTrees
from specq.drafting.eagle3.source import make
from specq.drafting.head_files import output_matrix
from specq.drafting.head_kinds import kind_of, own_heads
from specq.drafting.trees.interface import TreeRequest
from specq.engines import read_info
from specq.engines.torch.loading import load_network
from specq.models import find_model
from specq.protocol import BF16, EAGLE, FINAL, ConfigError, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import WEIGHTS
from specq.testing.checkpoints_mtp import DEEPSEEK, MIMO, QWEN, MtpLayout, add_mtp, mtp_logits
from specq.testing.world import World
from specq.verifier.sources import Followed, Setup
from tests.devices import NEEDS_CUDA
from tests.drafting.eagle3.plain_eagle import on_gpu, scores_of
from tests.drafting.eagle3.test_eagle_remote import made, served, texts
from tests.drafting.medusa.test_medusa import tiny
from tests.replaying import StandIn

__all__ = ["tiny"]  # a fixture

LAYOUTS = {"DeepSeek-V3's": DEEPSEEK, "Qwen3-Next's": QWEN, "MiMo's": MIMO}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
GREEDY = SamplingParams()


def head_of(target: Path, kind: str) -> Eagle | HostEagle:
    info = read_info(target)
    if kind == "without torch":
        return HostEagle(load_arrays(str(target), str(target), info))
    eagle = load_eagle(str(target), str(target), info, "cpu")
    return Eagle(on_gpu(eagle) if kind == "on a GPU" else eagle, StandIn() if kind == "recorded" else None)


@each_layout
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["as needed", "recorded", "without torch", pytest.param("on a GPU", marks=NEEDS_CUDA)])
def test_trees_are_those_of_plain_arithmetic(tmp_path: Path, layout: MtpLayout, model: str, kind: str) -> None:
    """Behind a text that comes in parts from its beginning, and behind one that is known from later on."""
    target = add_mtp(make_checkpoint(model, tmp_path), layout, has_matrices=layout is DEEPSEEK)
    head, random = head_of(target, kind), np.random.default_rng(2)
    states = random.normal(0, 1, (20, head.width)).astype(np.float32)
    tokens, spans = random.integers(0, VOCAB, 20).tolist(), {0: ((1, 4), (4, 9)), 1: ((6, 12),)}
    for i, parts in spans.items():
        for first, end in parts:
            head.observe(head.copied(states), [Followed(i, first, tokens[first:end], range(first - 1, end - 1))])
            head.follow([i])
    found = head.start([TreeRequest(list(spans), [GREEDY] * 2, 3, None, -np.inf)])[0].collect()
    for tree, parts in enumerate(spans.values()):
        first, end = parts[0][0], parts[-1][1]
        given = torch.from_numpy(states[first - 1 : end - 1])
        nodes = scores_of(found, tree)
        assert max(map(len, nodes)) == 3
        best = max((path for path in nodes if len(path) == 3), key=lambda path: nodes[path][1])
        said = mtp_logits(target, layout, given, [*tokens[first:end], *best[:2]], first)[-3:].log_softmax(-1)
        for depth, token in enumerate(best):
            assert nodes[best[: depth + 1]][0] == pytest.approx(float(said[depth, token]), abs=2e-3)
        assert said[0].argmax() == max((path for path in nodes if len(path) == 1), key=lambda path: nodes[path][1])[0]


@each_layout
def test_it_reads_the_states_that_its_layout_has(tmp_path: Path, layout: MtpLayout) -> None:
    """MiMo's the last layer's output, the others what the target's final norm made of it."""
    target = add_mtp(make_checkpoint("qwen2", tmp_path), layout)
    found = mtp_layer(target)
    assert (found.shape.layers, found.num_layers) == ((2,) if layout is MIMO else (FINAL,), 1)
    assert kind_of(target).describe(target, target, read_info(target)) == "an MTP layer of the target itself"


def test_of_several_layers_the_first_is_used(tmp_path: Path) -> None:
    target = add_mtp(make_checkpoint("llama", tmp_path), DEEPSEEK)
    expected = load_arrays(str(target), str(target), read_info(target))
    change(target, {name.replace("layers.3.", "layers.4."): one * 2 for name, one in of_mtp(target).items()})
    found = load_arrays(str(target), str(target), read_info(target))
    assert mtp_layer(target).num_layers == 2
    assert all(np.array_equal(found.weights[name], one) for name, one in expected.weights.items())


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def with_mtp(request: pytest.FixtureRequest, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The toy model with an MTP layer that is sure of its random tokens."""
    copied = shutil.copytree(tiny, tmp_path_factory.mktemp("tiny") / "target")
    return str(add_mtp(copied, request.param, scale=0.2))


def test_a_random_layer_changes_no_text(tiny: str, with_mtp: str) -> None:
    """In the verifier and in a draft worker, greedy and sampled, several jobs at once."""
    plain = [job.token_ids for job in texts(served(made(tiny)))]
    engine = made(with_mtp)
    source = make(Setup(TargetConfig(heads=with_mtp), engine.info, "", "cpu", bool, target=with_mtp, heads=with_mtp))
    assert source is not None
    world = World()
    world.add_verifier(engine=engine, sources=[source], measures_drafts=False)
    beside = texts(world)
    assert [job.token_ids for job in beside] == plain
    assert sum(int(str(job.stats["draft_tokens"])) for job in beside) > 20
    engine = made(with_mtp)
    world, arrays = served(engine), load_arrays(with_mtp, with_mtp, engine.info)
    world.add_drafter(b"d0", EagleTrees(HostEagle(arrays), engine.info, form=BF16, window=512))
    remote = texts(world)
    assert [job.token_ids for job in remote] == plain
    assert sum(int(str(job.stats["draft_tokens"])) for job in remote) > 0


def test_a_layer_that_passes_on_a_state_predicts_what_the_target_makes_of_it(tiny: str, tmp_path: Path) -> None:
    """The state is in the second half of what its matrix reads, and reaches the target's own output matrix."""
    target = add_mtp(Path(shutil.copytree(tiny, tmp_path / "target")), DEEPSEEK)
    hidden, wanted = output_matrix(target).shape[1], {name: one * 0 for name, one in of_mtp(target).items()}
    prefix = ".".join(next(iter(wanted)).split(".")[:3])
    wanted[f"{prefix}.eh_proj.weight"][:, hidden:] = torch.eye(hidden)
    for norm in ("hnorm", "shared_head.norm"):
        wanted[f"{prefix}.{norm}.weight"] += 1
    change(target, wanted)
    head = HostEagle(load_arrays(str(target), str(target), read_info(target)))
    row = np.random.default_rng(0).normal(0, 1, (1, hidden)).astype(np.float32)
    head.observe(row, [Followed(0, 1, [5], range(1))])
    head.follow([0])
    found, output = head.logits([head.last(head.texts[0])])[0], output_matrix(target).float().numpy()
    np.testing.assert_allclose(found, (output @ (row[0] / np.sqrt(np.square(row).mean())))[: len(found)], atol=1e-2)


@each_layout
def test_the_target_loads_as_without_it(tmp_path: Path, layout: MtpLayout) -> None:
    """With the same logits, and nothing reported."""
    plain, target = make_checkpoint("qwen3", tmp_path / "a"), add_mtp(make_checkpoint("qwen3", tmp_path / "b"), layout)
    ids, place = torch.tensor([[5, 9, 33]]), torch.device("cpu")
    reports, handler = list[logging.LogRecord](), logging.Handler()
    handler.emit = reports.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    with torch.inference_mode():
        assert torch.equal(load_network(target, place)(ids).logits, load_network(plain, place)(ids).logits)
    logging.getLogger("transformers").removeHandler(handler)
    assert [one.getMessage() for one in reports] == []


def test_mimo_is_a_qwen2_with_mtp_layers(tmp_path: Path) -> None:
    plain, target = make_checkpoint("qwen2", tmp_path / "a"), add_mtp(make_checkpoint("qwen2", tmp_path / "b"), MIMO)
    config(target, model_type="mimo", architectures=["MiMoForCausalLM"])
    ids, place = torch.tensor([[5, 9, 33]]), torch.device("cpu")
    with torch.inference_mode():
        assert torch.equal(load_network(target, place)(ids).logits, load_network(plain, place)(ids).logits)
    assert (kind_of(target).source, own_heads(str(target)), own_heads(str(plain))) == (EAGLE, str(target), "")


# --- refusals ---------------------------------------------------------------------------------------------------------


def change(target: Path, tensors: dict[str, Any]) -> None:
    """Overwrite tensors of a checkpoint. None removes one."""
    found = {**load_file(target / WEIGHTS), **tensors}
    kept = {name: one for name, one in found.items() if one is not None}
    save_file(kept, target / WEIGHTS, metadata={"format": "pt"})


def config(target: Path, **changes: Any) -> None:
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def of_mtp(target: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's MTP layers in DeepSeek-V3's layout."""
    first = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    return {name: one for name, one in load_file(target / WEIGHTS).items() if f"layers.{first}." in name}


def refused(target: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        kind_of(target).check(target)
    assert not own_heads(str(target))


ZEROS = torch.zeros(2)
LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"self_attn.kv_a_proj_with_mqa.weight": ZEROS}, r"has multi-head latent attention \(model.layers.3.self_"),
        ({"mlp.experts.0.up_proj.weight": ZEROS}, r"has a mixture of experts .*; MTP layers are computed"),
        ({"linear_attn.in_proj.weight": ZEROS}, "has linear attention .* of a Llama, Qwen2 or Qwen3"),
        ({"self_attn.q_proj.weight": torch.zeros(128, 40)}, r"attention has gates .* has 128 rows instead of 64"),
        ({"self_attn.q_proj.weight": torch.zeros(48, 40)}, r"layers.3.self_attn.q_proj.weight has the shape \(48"),
        ({"eh_proj.weight": torch.zeros(40, 40)}, r"model.layers.3.eh_proj.weight has the shape \(40, 40\), and"),
        ({"shared_head.head.weight": torch.zeros(98, 40)}, r"shared_head.head.weight has the shape \(98, 40\)"),
        ({"enorm.weight": None}, "cannot be used: model.layers.3.enorm.weight is missing"),
        ({"mlp.up_proj.weight": None}, "model.layers.3.mlp.up_proj.weight is missing"),
        ({"extra.weight": ZEROS}, "it has model.layers.3.extra.weight, which MTP layers have not"),
        ({"self_attn.o_proj.bias": torch.zeros(40)}, "it has model.layers.3.self_attn.o_proj.bias, which MTP"),
        ({"hnorm.weight": torch.zeros(40).to(torch.float8_e4m3fn)}, "hnorm.weight is F8_E4M3, and should be float"),
    ],
)  # fmt: skip
def test_an_almost_known_layer_is_refused(tmp_path: Path, tensors: dict[str, Any], match: str) -> None:
    target = add_mtp(make_checkpoint("llama", tmp_path), DEEPSEEK)
    change(target, {LAYER + name: one for name, one in tensors.items()})
    refused(target, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; MTP layers are computed with 1"),
        (
            {"model_type": "qwen3_next"},
            "model_type is 'qwen3_next'; MTP layers are computed with 'llama' or 'qwen2' or",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; MTP layers are computed with 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling is 'yarn'; MTP layers are computed with default"),
    ],
)
def test_an_almost_known_config_is_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    target = add_mtp(make_checkpoint("llama", tmp_path), QWEN)
    config(target, **changes)
    refused(target, match)


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    one, other = (add_mtp(make_checkpoint("llama", tmp_path / name), QWEN) for name in "ab")
    with pytest.raises(ConfigError, match="it drafts for this target only, not for b"):
        load_arrays(str(one), str(other), read_info(other))


def test_layers_that_are_not_mtp_layers_are_none(tmp_path: Path) -> None:
    """A checkpoint with more layers than its config.json says, one without any more, and a damaged one."""
    target = make_checkpoint("llama", tmp_path)
    assert not is_mtp(target)
    config(target, num_hidden_layers=2)
    assert not is_mtp(target)
    with pytest.raises(
        ConfigError, match=r"has no MTP layer: no tensors mtp\.\*, model\.mtp_layers\.\*, model\.layers"
    ):
        mtp_layer(target)
    add_mtp(target, QWEN)
    assert is_usable(target)
    with (target / WEIGHTS).open("r+b") as file:
        file.truncate(9)
    assert not is_mtp(target)


def test_values_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    target = add_mtp(make_checkpoint("llama", tmp_path), MIMO)
    change(target, {"model.mtp_layers.0.hidden_layernorm.weight": torch.full((40,), torch.nan)})
    with pytest.raises(ConfigError, match=r"not finite, in midlayer\.hidden_norm\.weight of an MTP layer"):
        load_arrays(str(target), str(target), read_info(target))


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def header(said: object) -> bytes:
    """Return a safetensors file of this header, and of four bytes behind it."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


@pytest.mark.parametrize(
    "file",
    [
        b"", (1 << 63).to_bytes(8, "little"), header(b"\xff\xfe{"), header(b"[" * 200_000), header([1]),
        header({"a": 1}),
        header({"mtp.norm.weight": TENSOR | {"data_offsets": [-9, 4]}}),
        header({"mtp.norm.weight": TENSOR | {"data_offsets": [0, 1 << 80]}}),
        header({"mtp.norm.weight": TENSOR | {"data_offsets": [4, 0]}}),
        header({"mtp.norm.weight": TENSOR | {"data_offsets": {"a": 1}}}),
        header({f"mtp.layers.{'9' * 5000}.norm.weight": TENSOR}),
        header({f"model.layers.{'9' * 5000}.eh_proj.weight": TENSOR}),
        header({f"model.mtp_layers.{'9' * 5000}.norm.weight": TENSOR}),
    ],
    ids=lambda _: "file",
)  # fmt: skip
def test_a_hostile_file_beside_the_weights_hides_no_target(tmp_path: Path, file: bytes) -> None:
    """The engines do not read such a file, so the target serves as without it."""
    target = make_checkpoint("llama", tmp_path)
    (target / "zz.safetensors").write_bytes(file)
    assert (own_heads(str(target)), find_model(str(target), "target")) == ("", str(target))


def test_files_that_cannot_be_opened_hide_no_target(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path)
    (target / "a.safetensors").symlink_to(tmp_path / "nowhere")
    (target / "b.safetensors").mkdir()
    os.mkfifo(target / "c.safetensors")
    assert not own_heads(str(target))


def test_a_rotation_of_no_kind_is_refused(tmp_path: Path) -> None:
    target = add_mtp(make_checkpoint("llama", tmp_path), QWEN)
    config(target, rope_parameters={"rope_type": {}})
    refused(target, "rope_scaling is {}; MTP layers are computed with default")


def of_itself(target: Path, heads: str) -> Setup:
    return Setup(TargetConfig(heads=heads), read_info(target), "", "cpu", bool, target=str(target), heads=str(target))


def test_a_target_serves_without_a_layer_that_it_cannot_load(tmp_path: Path) -> None:
    """If the layer is the default. If it was asked for, the reason is reported."""
    target = add_mtp(make_checkpoint("llama", tmp_path), MIMO)
    assert make(of_itself(target, MTP)) is not None
    change(target, {"model.mtp_layers.0.hidden_layernorm.weight": torch.full((40,), torch.nan)})
    assert own_heads(str(target))
    assert make(of_itself(target, MTP)) is None
    with pytest.raises(ConfigError, match="not finite"):
        make(of_itself(target, str(target)))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")], ids=str)
def test_a_target_serves_without_a_layer_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    target = add_mtp(make_checkpoint("llama", tmp_path), QWEN)
    monkeypatch.setattr("specq.drafting.eagle3.arrays.load_arrays", fail)
    assert make(of_itself(target, MTP)) is None
    with pytest.raises(type(error)):
        make(of_itself(target, str(target)))


def test_a_layer_is_not_loaded_beyond_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill the process."""
    target = add_mtp(make_checkpoint("llama", tmp_path), QWEN)
    found = load_arrays(str(target), str(target), read_info(target))
    size = sum(one.nbytes for one in found.weights.values()) + found.embedding.nbytes
    assert 2 * size <= loading_bytes(target) < 2.2 * size
    for free, is_there in ((loading_bytes(target), True), (loading_bytes(target) - 1, False), (None, True)):
        monkeypatch.setattr("specq.drafting.eagle3.source.available_memory", lambda free=free: free)
        assert (make(of_itself(target, MTP)) is not None) is is_there
        assert make(of_itself(target, str(target))) is not None
