"""vLLM's own drafter behind our steps, by real vLLM: what it drafts is what its head says by plain arithmetic, however
the step was judged, and the text stays the target's. `make test-vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from specq.drafting.of_engine.source import OfEngine
from specq.engines.vllm.engine import VllmEngine
from specq.protocol import NO_DRAFTS, OF_ENGINE, ConfigError
from specq.protocol.params import SamplingParams
from specq.protocol.step_output import Tap
from specq.protocol.types import NO_TREE, SessionStep, Tree
from specq.testing.checkpoints import DECODER, VOCAB, load_reference, random_tokens, save_random
from specq.testing.checkpoints_block import as_block_of_speculators, block_shape_of, make_block
from specq.testing.checkpoints_eagle import as_speculators, eagle_logits, eagle_shape_of, make_eagle
from specq.verifier.core import Verifier
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.overlapping import let_judge, plain, serve

pytestmark = NEEDS_VLLM

HIDDEN, LEVELS, LAYERS = DECODER["hidden_size"], 3, (0, 1, 3)
SHAPE = eagle_shape_of(
    HIDDEN, VOCAB, 23, layers=LAYERS, head_dim=64, num_key_value_heads=4, max_position_embeddings=600
)
TARGET = {"model_type": "llama", **DECODER, "num_hidden_layers": 5, "head_dim": 64, "num_key_value_heads": 4}
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("target"), TARGET)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("heads"), SHAPE)


@pytest.fixture(scope="module")
def started(target: Path, heads: Path, vllm_device: str):
    arguments = vllm_arguments(vllm_device) | {"dtype": "float32"}
    made = VllmEngine(str(target), kv_slots=1536, heads=str(heads), levels=LEVELS, **arguments)
    yield made
    made.shutdown()


@pytest.fixture(params=["judged by the host", "judged by the device"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return request.param == "judged by the device"


@pytest.fixture
def engine(started: VllmEngine, overlaps: bool):
    """An engine without sessions, and after the test again."""
    let_judge(overlaps, started._sessions._core.model_executor.driver_worker)
    yield started
    for session_id in range(20):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots


class Plain:
    """The target and the head, by plain arithmetic."""

    def __init__(self, target: Path, heads: Path) -> None:
        self.model, self.heads = load_reference(target), heads
        stored = load_file(heads / "model.safetensors")
        self.embedding = stored["embed_tokens.weight"]
        self.ids = torch.arange(len(stored["d2t"])) + stored["d2t"]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], first: int = 0) -> list[int]:
        """What the head drafts behind a text, if it knows the states of the target from `first` on."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taps, path = torch.cat([states[layer + 1][0, first:-1] for layer in LAYERS], 1), list[int]()
        for _ in range(LEVELS):
            logits = eagle_logits(self.heads, SHAPE, taps, [*tokens[first + 1 :], *path], self.embedding, first + 1)
            path.append(int(self.ids[logits[-1].argmax()]))
        return path

    @torch.inference_mode()
    def next_token(self, tokens: list[int]) -> int:
        return int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())


def chain(tokens: list[int]) -> Tree:
    count = len(tokens)
    return Tree(np.array(tokens, np.int32), np.arange(count, dtype=np.int32) - 1, np.zeros(count, np.float32))


def guesses(plain: Plain, tokens: list[int], rng: np.random.Generator) -> list[int]:
    """A chain that is right for some tokens. Behind a wrong one it goes on as the target would."""
    found, wrong = list[int](), int(rng.integers(0, 6))
    for level in range(int(rng.integers(0, 5))):
        found.append((plain.next_token([*tokens, *found]) + (level == wrong)) % VOCAB)
    return found


def test_it_drafts_what_its_head_says(engine: VllmEngine, target: Path, heads: Path, overlaps: bool) -> None:
    """Sessions come one after the other, with prompts in parts, of which some are cached; chains of any length are
    right, wrong, or wrong at their end. In some steps the drafter only follows the texts."""
    rng, plain = np.random.default_rng(1 + overlaps), Plain(target, heads)
    prompts = [random_tokens(rng, count).tolist() for count in (80, 23, 7)]
    prompts.append([*prompts[0][:70], 5, 6])  # its first block is cached: vLLM computes the last one anew
    texts, kv, compared, accepted = dict[int, list[int]](), dict[int, int](), 0, 0
    for turn in range(22):
        if turn % 3 == 0 and len(texts) < len(prompts):
            i = len(texts)
            texts[i], kv[i] = list(prompts[i]), engine.open(i, np.array(prompts[i], np.int32))
            assert kv[i] == (32 if i == 3 else 0)
        steps = []
        for i, tokens in [*texts.items()][:: 1 if turn % 3 else -1]:  # in another order than vLLM's
            pending = tokens[kv[i] :][: 1 if turn % 7 == 2 else (37, 3, 2, 37)[i]]
            is_end = kv[i] + len(pending) == len(tokens)
            tree = chain(guesses(plain, tokens, rng)) if is_end and turn % 4 else NO_TREE
            steps.append(SessionStep(i, kv[i], np.array(pending, np.int32), GREEDY, tree, judged=is_end))
        output = engine.step(steps, Tap(drafts=0 if turn % 5 == 1 else LEVELS))
        judgements = {judgement.session_id: judgement for judgement in output.judgements}
        assert (output.drafts is None) == (turn % 5 == 1)
        for place, step in enumerate(steps):
            i = step.session_id
            kv[i] += len(step.token_ids)
            if step.judged:
                kv[i] += len(judgements[i].path)
                accepted += len(judgements[i].path)
                texts[i] += judgements[i].token_ids.tolist()
                if output.drafts is not None:
                    assert output.drafts[place].tolist() == plain.drafts(texts[i]), (turn, i)
                    compared += 1
    assert compared > 25
    assert accepted > 10


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_the_same_with_its_drafts(
    engine: VllmEngine, seed: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps in flight, penalties, log-probabilities, prompts in parts; the drafter drafts, follows or sleeps."""
    monkeypatch.setattr(engine, "overlaps", overlaps)
    monkeypatch.setattr(engine._sessions, "overlaps", overlaps)
    expected, random, taps = serve(engine, seed), np.random.default_rng(seed), list[int]()
    launch = engine._sessions.launch

    def launched(batch: Any, drafts: int = NO_DRAFTS) -> Any:
        taps.append(drafts)
        return launch(batch, drafts)

    def decide(verifier: Verifier) -> None:
        policy, own = verifier.policy, frozenset([OF_ENGINE])
        if random.random() < 0.3:
            policy.allowed, policy.asleep = [(own, frozenset()), (frozenset(), frozenset()), (frozenset(), own)][
                int(random.integers(3))
            ]

    monkeypatch.setattr(engine._sessions, "launch", launched)
    source = OfEngine(LEVELS)
    assert serve(engine, seed, source=source, before_step=decide) == expected
    assert {-1, 0, LEVELS} <= set(taps)
    assert not source._drafts


def test_texts_with_grammars_are_the_same_with_its_drafts(engine: VllmEngine) -> None:
    """Such a step may be judged after the next message. It drafts then."""
    grammar = '{"regex":"([a-z ]|[0-9]{3})*"}'
    expected = serve(engine, 0, 0.0, grammar)
    assert serve(engine, 0, 0.0, grammar, source=OfEngine(LEVELS)) == expected


def test_it_goes_on_behind_what_it_missed(engine: VllmEngine, target: Path, heads: Path, overlaps: bool) -> None:
    """Beside texts that it knows. A text begins for it where it follows again, at a block."""
    rng, plain, block_size = np.random.default_rng(5 + overlaps), Plain(target, heads), 2 * 32
    if engine._sessions._scheduler.block_size not in (16, 32):
        pytest.skip("the gap would not end at a block")
    texts = {i: random_tokens(rng, count).tolist() for i, count in enumerate((70, 12, 90))}
    for i, tokens in texts.items():
        assert engine.open(i, np.array(tokens, np.int32)) == 0
    unseen = [SessionStep(i, 0, np.array(texts[i][:block_size], np.int32), GREEDY, judged=False) for i in (0, 2)]
    engine.step(unseen, Tap())
    kv = {0: block_size, 1: 0, 2: block_size}
    for turn in range(4):
        rest = {i: np.array(tokens[kv[i] :], np.int32) for i, tokens in texts.items()}
        trees = [chain([plain.next_token(tokens)]) if turn else NO_TREE for tokens in texts.values()]
        steps = [SessionStep(i, kv[i], rest[i], GREEDY, tree) for i, tree in zip(texts, trees, strict=True)]
        output = engine.step(steps, Tap(drafts=LEVELS))
        assert output.drafts is not None
        for i, judgement in enumerate(output.judgements):
            kv[i] = len(texts[i]) + len(judgement.path)
            texts[i] += judgement.token_ids.tolist()
            assert output.drafts[i].tolist() == plain.drafts(texts[i], 0 if i == 1 else block_size), (turn, i)


def test_a_step_behind_drafts_starts_where_it_would(engine: VllmEngine, target: Path, heads: Path) -> None:
    """The drafter counts lengths up while it drafts. The next plain step takes its own from the step before."""
    let_judge(True, engine._sessions._core.model_executor.driver_worker)
    plain_model, text, first = Plain(target, heads), [7, 8, 9], engine._sessions.overlaps
    engine.overlaps = engine._sessions.overlaps = True
    engine.open(1, np.array(text, np.int32))
    prompt = SessionStep(1, 0, np.array(text, np.int32), GREEDY)
    text += engine.step([prompt], Tap(drafts=LEVELS)).judgements[0].token_ids.tolist()
    flight = engine.launch(plain([1], [3], [text[-1]]), Tap(drafts=LEVELS))
    for start in range(4, 10):
        behind = engine.launch(plain([1], [start], [0], [0]), Tap(drafts=LEVELS), flight)
        text += flight.collect().judgements[0].token_ids.tolist()
        flight = behind
    output = flight.collect()
    text += output.judgements[0].token_ids.tolist()
    engine.overlaps = engine._sessions.overlaps = first
    for end in range(3, len(text)):
        assert text[end] == plain_model.next_token(text[:end])
    assert output.drafts is not None
    assert output.drafts[0].tolist() == plain_model.drafts(text)


def test_without_its_drafter_the_engine_goes_on(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of vLLM's drafter costs only drafts."""
    steps = engine._sessions._core.model_executor.driver_worker.worker.specq_steps
    expected = serve(engine)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no drafter")

    monkeypatch.setattr(steps._runner, "propose_draft_token_ids", fail)
    assert serve(engine, source=OfEngine(LEVELS)) == expected
    assert not steps.drafter.levels
    steps.drafter.levels = LEVELS


def test_drafts_take_no_memory_of_others(engine: VllmEngine, overlaps: bool) -> None:
    """Where all blocks are taken and full, the drafter gets none for its tokens, and steps run."""
    block_size = engine._sessions._scheduler.block_size
    for session_id in range(20):
        text = np.full(513, 5 + session_id, np.int32)
        assert engine.open(session_id, text, f"owner {overlaps}") == 0
        size = min(engine.free_slots, 512) // block_size * block_size
        if not size:
            break
        engine.step([SessionStep(session_id, 0, text[:size], GREEDY, judged=False)], Tap(drafts=LEVELS))
    assert session_id > 2


@pytest.mark.timeout(300)
def test_a_head_of_the_library_speculators_is_loaded_by_name(target: Path, tmp_path: Path, vllm_device: str) -> None:
    heads = as_speculators(make_eagle(tmp_path / "heads", SHAPE), str(target), layer={"hidden_act": "silu"})
    arguments = vllm_arguments(vllm_device) | {"dtype": "float32"}
    engine = VllmEngine(str(target), kv_slots=512, heads=str(heads), levels=2, **arguments)
    assert engine.own_levels == 2
    engine.shutdown()


def texts(engine: VllmEngine, plan: Tap, prompt: list[int], count: int) -> tuple[list[int], list[list[int]]]:
    """Return a text in which the drafts of each step are verified by the next one, and all drafts."""
    text, kv, found, tree = [*prompt], engine.open(1, np.array(prompt, np.int32)), list[list[int]](), NO_TREE
    while len(text) < len(prompt) + count:
        step = SessionStep(1, kv, np.array(text[kv:], np.int32), GREEDY, tree)
        output = engine.step([step], plan)
        (judgement,) = output.judgements
        kv = len(text) + len(judgement.path)
        text += judgement.token_ids.tolist()
        if output.drafts is not None:
            found.append(output.drafts[0].tolist())
            tree = chain(found[-1])
    engine.close(1)
    return text[: len(prompt) + count], found


@pytest.mark.timeout(300)
def test_a_block_drafter_drafts(target: Path, tmp_path: Path, vllm_device: str) -> None:
    """In the form of DFlash's authors. No text changes."""
    sizes = {"head_dim": 64, "num_key_value_heads": 4, "mask_token_id": 98, "max_position_embeddings": 600}
    shape = block_shape_of(HIDDEN, VOCAB, LAYERS, block_size=LEVELS + 1, norms_states=False, **sizes)
    heads = make_block(tmp_path / "heads", shape, scale=0.7)
    engine = VllmEngine(
        str(target), kv_slots=512, heads=str(heads), levels=LEVELS, **vllm_arguments(vllm_device) | {"dtype": "float32"}
    )
    prompt = random_tokens(np.random.default_rng(3), 20).tolist()
    text, drafts = texts(engine, Tap(drafts=LEVELS), prompt, 8)
    assert text == texts(engine, Tap(), prompt, 8)[0]
    assert len({tuple(found) for found in drafts}) > 2
    engine.shutdown()


@pytest.mark.timeout(300)
def test_heads_that_vllm_cannot_build_are_named(target: Path, tmp_path: Path, vllm_device: str) -> None:
    """It reads a number that their config.json lacks, and raises what an error of our own would be, too."""
    shape = block_shape_of(HIDDEN, VOCAB, LAYERS, norms_states=False, mask_token_id=98)
    heads = as_block_of_speculators(make_block(tmp_path / "heads", shape), target)
    with pytest.raises(ConfigError, match=r"vLLM cannot run .* with the heads .*heads so: .*'max_position_embeddings'"):
        VllmEngine(str(target), kv_slots=512, heads=str(heads), **vllm_arguments(vllm_device) | {"dtype": "float32"})


@pytest.mark.timeout(300)
def test_layers_inside_the_checkpoint_draft(tmp_path: Path, vllm_device: str) -> None:
    """`mtp`: made-up weights of a mixture of experts with a layer that predicts the token after the next one."""
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
    config = AutoConfig.for_model(
        *("glm4_moe",),
        **DECODER | {"hidden_size": 128, "head_dim": 64},
        **moe | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
    )
    config.architectures = ["Glm4MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    arguments = vllm_arguments(vllm_device) | {"dtype": "float32"}
    arguments["options"] = arguments.get("options", {}) | {"load_format": "dummy"}
    from specq.engines.vllm.sessions import leave_groups

    leave_groups()  # those of models without experts
    engine = VllmEngine(str(tmp_path), kv_slots=512, heads="mtp", levels=LEVELS, **arguments)
    text, drafts = texts(engine, Tap(drafts=LEVELS), [5, 6, 7, 8], 20)
    assert text == texts(engine, Tap(), [5, 6, 7, 8], 20)[0]
    assert {len(found) for found in drafts} == {LEVELS}
    engine.shutdown()
