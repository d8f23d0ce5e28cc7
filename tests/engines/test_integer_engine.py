"""An engine in integer arithmetic does what an engine must do, with the texts of the pass in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from bench.random_gguf import TINY, Q, write_random
from specq.drafting.draft_model.chain_model import ChainModel
from specq.engines.native import EXACT, INTEGER, ROUNDED, kernels
from specq.engines.native.engine import NativeEngine
from specq.engines.native.loading import load
from specq.engines.torch.loading import load as load_with_torch
from specq.protocol import ConfigError, SamplingParams, SessionStep
from specq.testing import EngineConformance, ReferenceConformance
from specq.testing.checkpoints import make_checkpoint
from specq.testing.checkpoints_gguf import tokenizer_keys
from specq.testing.integer_reference import IntegerReference

pytestmark = [
    pytest.mark.skipif(kernels() is None, reason="no C compiler"),
    pytest.mark.usefixtures("own_blocks"),
]
SMALL = {**TINY, "vocab": 320, "context": 512}


def types(name: str):
    return Q.Q5_0 if "ffn_gate" in name else Q.Q8_0 if "attn_v" in name else Q.Q4_0


@pytest.fixture
def engine(tmp_path):
    path = write_random(tmp_path / "model.gguf", types, shape=SMALL, metadata=tokenizer_keys(320))
    made = NativeEngine(str(path), kv_slots=512, arithmetic=INTEGER)
    yield made
    made.shutdown()


@pytest.fixture
def target(engine, tmp_path):
    """The logits behind a text, in plain NumPy."""
    reference = IntegerReference(tmp_path / "model.gguf")
    return lambda token_ids: reference(token_ids)[-1]


class TestConformance(EngineConformance, ReferenceConformance):
    """With the fixtures above."""


def test_only_gguf_files_have_integers(tmp_path):
    with pytest.raises(ConfigError, match="it is not a GGUF file"):
        load(str(make_checkpoint("llama", tmp_path)), arithmetic=INTEGER)


def test_other_names_are_refused(tmp_path):
    path = write_random(tmp_path / "model.gguf", types, shape=SMALL, metadata=tokenizer_keys(320))
    with pytest.raises(ConfigError, match="arithmetic is 'float'; known are auto, exact, rounded, integer"):
        load(str(path), arithmetic="float")


def test_quantised_files_are_computed_in_integers(tmp_path):
    for kind, expected in ((Q.Q4_0, "integer cpu"), (Q.Q4_1, "integer cpu"), (Q.F16, "native cpu")):
        path = write_random(
            tmp_path / f"{kind.name}.gguf", lambda _, own=kind: own, shape=SMALL, metadata=tokenizer_keys(320)
        )
        assert load(str(path)).info.arithmetic == expected
        assert load(str(path), dtype="float32").info.arithmetic == "native cpu"


def test_exact_and_rounded_arithmetic_are_two_models_and_both_those_of_torch(tmp_path):
    """A job of an earlier version, whose values were rounded, goes on in `rounded` arithmetic."""
    for kind, usual in ((Q.Q4_0, ROUNDED), (Q.Q4_1, EXACT), (Q.F16, ROUNDED)):
        path = write_random(
            tmp_path / f"{kind.name}.gguf", lambda _, own=kind: own, shape=SMALL, metadata=tokenizer_keys(320)
        )
        infos = {name: load(str(path), arithmetic=name).info for name in (EXACT, ROUNDED)}
        assert {info.arithmetic for info in infos.values()} == {"native cpu"}
        assert infos[EXACT].fingerprint != infos[ROUNDED].fingerprint
        before = load_with_torch(str(path), device="cpu").info
        assert (before.fingerprint, before.arithmetic) == (infos[usual].fingerprint, infos[usual].arithmetic)


def test_a_draft_model_of_such_a_file_drafts_what_the_engine_says(tmp_path):
    """Chains in one call are those of the pass, level by level."""
    path = write_random(tmp_path / "model.gguf", types, shape=SMALL, metadata=tokenizer_keys(320))
    engine, chains = NativeEngine(str(path), kv_slots=512), ChainModel(str(path), device="cpu", kv_slots=512)
    text, params = np.array([5, 70, 9, 30], np.int32), SamplingParams()
    chains.open(1, text, params)
    drafted = chains.start([1], 4, 1).collect().token_ids.reshape(-1).tolist()
    engine.open(1, text)
    said: list[int] = []
    for start in range(4):
        new = text if not said else np.array(said[-1:], np.int32)
        (judgement,) = engine.step([SessionStep(1, len(text) - 1 + start if said else 0, new, params)]).judgements
        said += judgement.token_ids.tolist()
    assert drafted == said


def test_a_file_without_quantised_types_has_no_integers(tmp_path):
    path = write_random(tmp_path / "model.gguf", lambda _: Q.F16, shape=SMALL, metadata=tokenizer_keys(320))
    with pytest.raises(ConfigError, match=r"needs a GGUF file with quantised types \(Q4_0, .*use arithmetic = exact"):
        load(str(path), arithmetic=INTEGER)
