"""The native engine: no torch in the process that serves, and the bits of the torch engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specq.engines.native import kernels
from specq.engines.native.engine import NativeEngine
from specq.engines.native.gguf import rounded
from specq.engines.native.rotary import attention_scale, inverse_frequencies, rotary_tables
from specq.engines.torch.engine import TorchEngine
from specq.models import parallel_for, resolve_model
from specq.protocol import ConfigError, SamplingParams, Tap
from specq.protocol.step_output import FINAL
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import make_checkpoint, random_tokens, random_tree, save_random
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.checkpoints_gguf import MADE, Q, keep_values, write_gguf
from specq.testing.checkpoints_heads import make_published

EAGLE = eagle_shape_of(MADE["hidden_size"], MADE["vocab_size"], 40, layers=(0, 1, 2))
pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")

# A verifier serves a few jobs, in a process in which an import of torch fails.
SERVE = """
import json
import sys
import time

sys.modules.update(torch=None, transformers=None)

import numpy as np

from specq.config import TargetConfig
from specq.processes.target import build_verifier
from specq.protocol import SamplingParams
from specq.protocol.messages import Ack, Close, Open, SessionFailed

model, draft, heads, jobs = json.loads(sys.argv[1])
config = TargetConfig(
    model=model, draft_model=draft, heads=heads, engine="native", max_step_rows=16, max_sessions=8, verbose=True,
    lookahead=True,
)
verifier, texts = build_verifier(config, "t"), {}
for i, values in enumerate(jobs):
    ids = np.arange(3 + i, 20 + i, dtype=np.int32)
    params = SamplingParams.from_dict(values)
    opened = Open(session_id=i, epoch=1, prompt_len=len(ids), tokens_left=12, params=params, token_ids=ids)
    assert verifier.handle(opened, 0.0) == []
end = time.monotonic() + 60
while verifier.sessions and time.monotonic() < end:
    verifier.begin(time.monotonic(), time.monotonic)
    for report in [*verifier.take_grammars(), *(verifier.step(time.monotonic) if verifier.has_work else ())]:
        assert not isinstance(report, SessionFailed), report.reason
        session = verifier.sessions[report.session_id]
        verifier.handle(Ack(session_id=session.session_id, epoch=1, length=session.length), 0.0)
        if report.finish:
            texts[session.session_id] = [*map(int, session.token_ids[session.prompt_len :])]
            verifier.handle(Close(session_id=session.session_id, epoch=1), 0.0)
methods = sorted(source.name for source in verifier.sources.sources)
print(json.dumps([texts, methods, sorted(name for name in sys.modules if name.split(".")[0] == "torch")]))
"""
# Draft workers' drafters expand the context and a node, in a process in which an import of torch fails.
DRAFT = """
import json
import sys

sys.modules.update(torch=None, transformers=None)

import numpy as np

from specq.drafting import CONTEXT, DRAFTERS, Expansion
from specq.protocol import SamplingParams

model, eagle, medusa = json.loads(sys.argv[1])
ids = np.arange(3, 20, dtype=np.int32)


def counts(drafter):
    drafter.open(1, ids, SamplingParams())
    if drafter.width:
        drafter.observe(1, 1, np.random.default_rng(0).normal(size=(len(ids) - 1, drafter.width)).astype(np.float32))
    (found,) = drafter.expand([Expansion(1, CONTEXT, (0, 1, 2, 3))])
    (below,) = drafter.expand([Expansion(1, 0, (4, 5, 6))])
    drafter.commit(1, found.token_ids[:1], [0])
    return [len(found.token_ids), len(below.token_ids)]


made = [
    DRAFTERS.resolve("eagle3").make(eagle, target=model),
    DRAFTERS.resolve("draft-model").make(model, heads=medusa),
]
print(json.dumps([counts(drafter) for drafter in made]))
"""
JOBS = [
    {"max_tokens": 12},
    {"max_tokens": 12, "temperature": 0.8, "seed": 1, "top_p": 0.9, "logprobs": 2},
    {"max_tokens": 12, "temperature": 0.8, "seed": 2, "strategy": "typical"},
    {"max_tokens": 12, "temperature": 0.8, "seed": 3, "strategy": "threshold", "frequency_penalty": 0.5},
    {"max_tokens": 12, "temperature": 0.8, "seed": 4, "min_p": 0.1, "logit_bias": [[5, 2.0]], "min_tokens": 3},
    {"max_tokens": 12, "temperature": 0.8, "seed": 5, "allowed_token_ids": list(range(10, 90)), "prompt_logprobs": 1},
]


def serve(
    model: str, draft: str, jobs: list[dict[str, object]], heads: str = ""
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the texts of jobs and the names of the draft sources. No import of torch succeeded."""
    command = [sys.executable, "-c", SERVE, json.dumps([model, draft, heads, jobs])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    texts, methods, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported in ([], ["torch"])  # the name that makes imports fail
    return texts, methods


def write_model(source: Path, **config: object) -> str:
    save_random(source, {"model_type": "llama", **MADE, **config})
    keep_values(source, Q.Q8_0)
    return str(write_gguf(source, source / "model.gguf"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with as many layers as an EAGLE-3 head reads."""
    return write_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=3)


def test_a_verifier_serves_without_torch(model: str, tmp_path: Path) -> None:
    """All strategies but one, and the options that shape logits, with a draft model, Medusa heads, lookahead and
    explanations."""
    texts, methods = serve(model, model, JOBS, str(make_published(tmp_path, MADE["hidden_size"], MADE["vocab_size"])))
    assert {"colocated", "lookahead", "medusa", "suffix"} <= {*methods}
    assert sorted(texts) == [*map(str, range(len(JOBS)))]
    assert all(len(text) == 12 for text in texts.values())
    assert set(texts["5"]) <= set(range(10, 90))


def test_an_eagle_head_beside_the_verifier_without_torch(deep_model: str, tmp_path: Path) -> None:
    """Its drafts change no text, except under strategies that let drafts do so."""
    texts, methods = serve(deep_model, "", JOBS, str(make_eagle(tmp_path / "eagle", EAGLE, embedding=False)))
    assert "eagle3" in methods
    plain, lossless = serve(deep_model, "", JOBS)[0], [str(i) for i, job in enumerate(JOBS) if "strategy" not in job]
    assert {i: texts[i] for i in lossless} == {i: plain[i] for i in lossless}
    assert sorted(texts) == sorted(plain)


def test_draft_workers_with_heads_without_torch(deep_model: str, tmp_path: Path) -> None:
    """An EAGLE-3 head that reads hidden states, and a small model with Medusa heads."""
    eagle = make_eagle(tmp_path / "eagle", EAGLE, embedding=False)
    medusa = make_published(tmp_path / "medusa", MADE["hidden_size"], MADE["vocab_size"])
    command = [sys.executable, "-c", DRAFT, json.dumps([deep_model, str(eagle), str(medusa)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[4, 3], [4, 3]]


CUT = """
import os
import sys

import numpy as np

from specq.engines.native.engine import NativeEngine
from specq.protocol import SamplingParams, SessionStep


def said(session_id):
    text = np.arange(3, 43, dtype=np.int32)
    start = engine.open(session_id, text)
    steps = [SessionStep(session_id, start, text[start:], SamplingParams())]
    return engine.step(steps).judgements[0].token_ids.tolist()


path, arithmetic = sys.argv[1:]
engine = NativeEngine(path, kv_slots=512, arithmetic=arithmetic)
before = said(1)
engine.close(1)
os.truncate(path, 100)
assert said(2) == before
"""


@pytest.mark.parametrize("arithmetic", ["exact", "rounded"])
@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0], ids=["F32", "Q8_0"])
def test_a_file_that_is_cut_while_it_is_served_harms_nothing(tmp_path: Path, kind: Q, arithmetic: str) -> None:
    """A read of a mapped file beyond its end would kill the process."""
    save_random(tmp_path, {"model_type": "llama", **MADE, "tie_word_embeddings": kind == Q.F32})
    path = write_gguf(tmp_path, tmp_path / "model.gguf", linear=kind)
    command = [sys.executable, "-c", CUT, str(path), arithmetic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_bundled_models_and_a_grammar_without_torch() -> None:
    """`smollm2` with its own drafters, the parallel one too, and also under `probabilistic`."""
    jobs = [JOBS[0], {"max_tokens": 12, "temperature": 0.8, "seed": 1, "strategy": "probabilistic"}]
    jobs.append({"max_tokens": 12, "grammar": {"regex": "[a-z]{40}"}})
    found = [
        serve(resolve_model("smollm2", "target"), resolve_model(draft, "draft"), jobs)[0]
        for draft in ("smollm2", parallel_for("smollm2"))
    ]
    assert [len(found[0][str(i)]) for i in range(3)] == [12, 12, 12]
    assert all(found[0][str(i)] == found[1][str(i)] for i in (0, 2))


def steps_of(rng: np.random.Generator) -> list[SessionStep]:
    params = [SamplingParams(logprobs=3), SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.2)]
    return [SessionStep(i, 0, random_tokens(rng, 9 + i), own, random_tree(rng, 5)) for i, own in enumerate(params)]


def test_it_says_what_the_torch_engine_says(model: str) -> None:
    """Bit for bit, as the same model: a job may move from one to the other."""
    engines = NativeEngine(model, kv_slots=512, arithmetic="exact"), TorchEngine(model, device="cpu", kv_slots=512)
    outputs = []
    for engine in engines:
        for step in steps_of(np.random.default_rng(1)):
            engine.open(step.session_id, step.token_ids)
        outputs.append(engine.step(steps_of(np.random.default_rng(1)), Tap((0, FINAL))))
    ours, theirs = outputs
    for one, other in zip(ours.judgements, theirs.judgements, strict=True):
        assert (one.path, one.token_ids.tolist()) == (other.path, other.token_ids.tolist())
    assert ours.judgements[0].logprobs is not None
    assert np.array_equal(ours.hidden.values, theirs.hidden.values)
    infos = [engine.info for engine in engines]
    assert infos[0].engine == "native"
    assert (infos[0].fingerprint, infos[0].arithmetic) == (infos[1].fingerprint, infos[1].arithmetic)


def test_what_it_cannot_run_is_refused_with_what_can(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"not a GGUF file; use the torch engine"):
        NativeEngine(str(make_checkpoint("llama", tmp_path)))
    with pytest.raises(ConfigError, match="give cpu or auto"):
        NativeEngine(model, device="cuda")
    with pytest.raises(ConfigError, match="not in bfloat16; use the torch engine"):
        NativeEngine(model, dtype="bfloat16")


ROPES = {
    "default": {"rope_theta": 5000.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_are_those_of_transformers(kind: str) -> None:
    said = {"rope_type": kind, **ROPES[kind]}
    config = AutoConfig.for_model("llama", **{**MADE, "rope_parameters": said})
    if kind == "default":
        theirs, scale = 1.0 / 5000.0 ** (torch.arange(0, 32, 2).float() / 32), 1.0
    else:
        theirs, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    ours = inverse_frequencies(said, 32, None)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert attention_scale(said) == pytest.approx(scale)
    cos, sin = rotary_tables(ours, 600, attention_scale(said))
    angles = torch.arange(600).float()[:, None] * theirs
    np.testing.assert_allclose(cos, angles.cos().numpy() * scale, atol=1e-3)
    np.testing.assert_allclose(sin, angles.sin().numpy() * scale, atol=1e-3)


def test_values_are_rounded_as_torch_rounds() -> None:
    values = np.random.default_rng(0).normal(0, 1, 4096).astype(np.float32)
    ties = (np.arange(0x3F80_8000, 0x3F90_8000, 0x1_0000, dtype=np.uint32)).view(np.float32)
    for numbers in (values, ties, -ties):
        assert np.array_equal(rounded(numbers), torch.from_numpy(numbers).bfloat16().float().numpy())
