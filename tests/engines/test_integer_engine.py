"""An engine in integer arithmetic does what an engine must do, with the texts of the pass in plain NumPy."""

from __future__ import annotations

import pytest

from bench.random_gguf import TINY, Q, write_random
from specq.engines.native import INTEGER, kernels
from specq.engines.native.engine import NativeEngine
from specq.engines.native.loading import load
from specq.protocol import ConfigError
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
    with pytest.raises(ConfigError, match="arithmetic is .float.; known are exact, integer"):
        load(str(path), arithmetic="float")
