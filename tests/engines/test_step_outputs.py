"""Hidden states and scratch rows of the torch engine against transformers, and that neither moves a bit of what is
judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specq.engines.native.compiler import kernels
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.generic import GenericForward
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.step_output import FINAL, StepOutput, Tap
from specq.protocol.types import ScratchRows, SessionStep
from specq.testing.checkpoints import CONFIGS, load_reference, make_checkpoint, path_tokens, random_tokens, random_tree
from specq.testing.conformance.engines import EngineConformance
from specq.testing.toy import VOCAB as TOY_VOCAB
from specq.testing.toy import ToyEngine, next_token, toy_info

GREEDY = SamplingParams()
TOLERANCE = 1e-4
KINDS = [(kind, eager) for kind in CONFIGS for eager in (False, True)]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}{'-eager' if kind[1] else ''}", scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    kind, eager = request.param
    return make_checkpoint(kind, tmp_path_factory.mktemp(f"step-outputs-{kind}")), eager


def reference_hidden(reference, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Return what transformers says, [tokens, layers * hidden]: of FINAL what it gives last, else what goes out of a
    layer."""
    decoder = getattr(reference.base_model, "decoder", reference.base_model)
    kept: dict[int, torch.Tensor] = {}

    def keep(index: int):
        return lambda _module, _inputs, output: kept.update({index: output[0] if isinstance(output, tuple) else output})

    hooks = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(decoder.layers)]
    with torch.inference_mode():
        states = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    for index in range(len(kept) - 1):  # what the hooks keep is what transformers itself returns
        torch.testing.assert_close(kept[index], states[index + 1])
    kept[FINAL] = states[-1]
    return torch.cat([kept[layer][0] for layer in layers], 1)


def reference_row(reference, token_ids: list[int], positions: list[int]) -> torch.Tensor:
    """Return transformers' logits after a text whose tokens stand at these positions, [vocab]."""
    with torch.inference_mode():
        places, ones = torch.tensor([positions]), torch.ones(1, len(token_ids), dtype=torch.long)
        logits: torch.Tensor = reference(torch.tensor([token_ids]), ones, position_ids=places).logits[0, -1]
    return logits


def test_hidden_states_equal_transformers_of_each_row(place: tuple[Path, bool]) -> None:
    """Two prefill chunks, one with and one without a tap, then base row and nodes; beside a session that is not
    tapped."""
    checkpoint, eager = place
    engine, rng = TorchEngine(str(checkpoint), device="cpu", eager=eager), np.random.default_rng(0)
    reference, context, tree = load_reference(checkpoint), random_tokens(rng, 40), random_tree(rng, 7)
    layers = (engine.num_tap_layers - 1, FINAL, 0)
    expected = reference_hidden(reference, context.tolist(), layers)
    engine.open(1, context)
    other = random_tokens(rng, 30)
    engine.open(2, other)
    engine.step([SessionStep(1, 0, context[:10], GREEDY, judged=False)])
    tap = Tap(layers, frozenset([1]))
    chunks = [
        SessionStep(2, 0, other[:20], GREEDY, judged=False),
        SessionStep(1, 10, context[10:30], GREEDY, judged=False),
    ]
    output = engine.step(chunks, tap)
    assert not output.judgements
    check_hidden(output, 0, expected[:0])
    check_hidden(output, 1, expected[10:30])
    scratch = window(rng, 40)  # before the rows of the other session
    steps = [SessionStep(1, 30, context[30:], GREEDY, tree, scratch=scratch), SessionStep(2, 20, other[20:], GREEDY)]
    output = engine.step(steps, tap)
    paths = [context.tolist() + path_tokens(tree, node) for node in range(7)]
    nodes = [reference_hidden(reference, path, layers)[-1:] for path in paths]
    check_hidden(output, 0, torch.cat([expected[30:], *nodes]))
    check_hidden(output, 1, reference_hidden(reference, other.tolist(), layers)[-1:])


def check_hidden(output: StepOutput, index: int, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(output.hidden.of(index)), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_final_layer_alone_is_what_the_head_reads(place: tuple[Path, bool]) -> None:
    """No pass of its own: without a layer or a chunk, the forward is not asked for anything."""
    checkpoint, eager = place
    engine, rng = TorchEngine(str(checkpoint), device="cpu", eager=eager), np.random.default_rng(1)
    context, forward = random_tokens(rng, 12), engine._forward
    engine.open(1, context)

    engine._forward = lambda rows: forward(rows)  # type: ignore[assignment] # noqa: PLW0108 - it takes no tap
    step = SessionStep(1, 0, context, GREEDY, random_tree(rng, 3), scratch=window(rng, 12))
    output = engine.step([step], Tap((FINAL,)))
    assert len(output.hidden.values) == 4
    expected = reference_hidden(load_reference(checkpoint), context.tolist(), (FINAL,))
    torch.testing.assert_close(torch.as_tensor(output.hidden.of(0)[:1]), expected[-1:], atol=TOLERANCE, rtol=TOLERANCE)


def window(rng: np.random.Generator, base_len: int, width: int = 4, num_levels: int = 3) -> ScratchRows:
    """Lookahead's window: a chain after the context, and from each of its tokens a trajectory that goes on by a
    level."""
    parents = [*range(-1, width - 1), *(row for row in range(width * (num_levels - 1)))]
    tree_nodes = 3
    above = [parent if parent < 0 else parent + tree_nodes for parent in parents]
    places = [base_len + column + level for level in range(num_levels) for column in range(width)]
    return scratch_of(random_tokens(rng, width * num_levels), above, places)


def scratch_of(token_ids: Sequence[int] | Int32Array, parents: list[int], positions: list[int]) -> ScratchRows:
    return ScratchRows(*(np.array(part, np.int32) for part in (token_ids, parents, positions)))


def test_a_window_of_lookahead_equals_transformers_row_by_row(place: tuple[Path, bool]) -> None:
    """Each row's text is the context and its trajectory, at the positions that it names: also where some are left
    out."""
    checkpoint, eager = place
    engine, rng = TorchEngine(str(checkpoint), device="cpu", eager=eager), np.random.default_rng(2)
    reference, context, tree = load_reference(checkpoint), random_tokens(rng, 21), random_tree(rng, 3)
    rows = window(rng, 21)
    ahead = scratch_of(rows.token_ids[:2], [1, -1], [40, 30])  # below a node, and none
    engine.open(1, context)
    engine.open(2, context)
    steps = [SessionStep(i, 0, context, GREEDY, tree, scratch=own) for i, own in ((1, rows), (2, ahead))]
    scratch = engine.step(steps).scratch_logits
    for i, own in enumerate((rows, ahead)):
        for row in range(own.num_rows):
            token_ids, positions = row_text(steps[i], row)
            expected = reference_row(reference, context.tolist() + token_ids, [*range(21), *positions])
            torch.testing.assert_close(torch.as_tensor(scratch.of(i)[row]), expected, atol=TOLERANCE, rtol=TOLERANCE)


def row_text(step: SessionStep, row: int) -> tuple[list[int], list[int]]:
    """Return tokens and positions on the way to a scratch row."""
    num_nodes, tokens, places = step.tree.num_nodes, [], []
    while row >= 0:
        tokens.append(int(step.scratch.token_ids[row]))
        places.append(int(step.scratch.positions[row]))
        above = int(step.scratch.parents[row])
        row = above - num_nodes
    way = path_tokens(step.tree, above)
    depths = range(step.base_len, step.base_len + len(way))
    return way + tokens[::-1], [*depths, *places[::-1]]


def run_text(engine: TorchEngine, extras: bool) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Generate for 10 steps in two sessions; return the tokens, and the KV of each session in the order of
    positions."""
    rng, noise = np.random.default_rng(3), np.random.default_rng(4)
    texts = [random_tokens(rng, 11).tolist(), random_tokens(rng, 25).tolist()]
    starts = [engine.open(i, np.array(text, np.int32)) for i, text in enumerate(texts)]
    for turn in range(10):
        steps = [
            SessionStep(i, starts[i], np.array(text[starts[i] :], np.int32), GREEDY, random_tree(rng, 3))
            for i, text in enumerate(texts)
        ]
        for i in range(1 + turn % 2 if extras else 0):
            steps[i] = replace(steps[i], scratch=window(noise, steps[i].base_len))
        tap = Tap((0, FINAL), frozenset([turn % 2])) if extras else Tap()
        for i, judgement in enumerate(engine.step(steps, tap).judgements):
            starts[i] = len(texts[i]) + len(judgement.path)
            texts[i] += judgement.token_ids.tolist()
    slots = np.concatenate([engine._pool.table(i)[: starts[i]] for i in range(2)]).tolist()
    kv = engine._forward.kv
    return texts, torch.as_tensor(kv.keys[:, :, slots]), torch.as_tensor(kv.values[:, :, slots])  # copies, by index


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
def test_keys_and_values_are_the_same_bits_with_and_without(place: tuple[Path, bool]) -> None:
    """What the kernels promise; the generic path rounds as its batch is, here within the tolerance."""
    checkpoint, eager = place
    plain, extra = (TorchEngine(str(checkpoint), device="cpu", eager=eager, kv_slots=512) for _ in range(2))
    expected, found = run_text(plain, False), run_text(extra, True)
    assert found[0] == expected[0]
    assert extra.free_slots == plain.free_slots
    limit = TOLERANCE if isinstance(extra._forward, GenericForward) else 0
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, atol=limit, rtol=limit)


def test_positions_end_with_the_slots_and_tokens_with_the_vocabulary(tmp_path: Path) -> None:
    """The kernels have cosines only for a limited number of positions."""
    engine = TorchEngine(str(make_checkpoint("llama", tmp_path)), device="cpu", kv_slots=64)
    context = np.arange(5, dtype=np.int32)
    engine.open(1, context)
    with pytest.raises(EngineError, match="session 1: token ids outside"):
        engine.step([SessionStep(1, 0, context, GREEDY, scratch=scratch_of([99], [-1], [5]))])
    assert engine.free_slots == 64
    step = SessionStep(1, 0, context, GREEDY, scratch=scratch_of([7], [-1], [63]))
    assert engine.step([step]).scratch_logits is not None
    with pytest.raises(EngineError, match="stand at positions from 10 to 63"):
        engine.step([SessionStep(1, 5, context, GREEDY, scratch=scratch_of([7], [-1], [64]))])


def test_the_toy_engine_says_what_the_toy_target_says() -> None:
    """Its scratch rows give the next token of their text."""
    engine, context = ToyEngine(), [5, 6, 7]
    engine.open(1, np.array(context, np.int32))
    tree = random_tree(np.random.default_rng(0), 2)
    tree.token_ids[:] = [8, 9]
    tree.parents[:] = [-1, 0]
    rows = scratch_of([3, 4, 2], [-1, 2, 1], [3, 4, 5])
    output = engine.step([SessionStep(1, 0, np.array(context, np.int32), GREEDY, tree, scratch=rows)], Tap((1, FINAL)))
    said = output.scratch_logits.of(0)
    assert said.shape == (3, TOY_VOCAB)
    assert said.argmax(1).tolist() == [next_token([*context, *way]) for way in ([3], [3, 4], [8, 9, 2])]
    assert output.hidden.of(0).tolist() == [[1, 2, 7, -1, 2, 7], [1, 3, 8, -1, 3, 8], [1, 4, 9, -1, 4, 9]]


class TestToy:
    """The toy refuses what an engine must refuse."""

    @pytest.fixture
    def engine(self) -> ToyEngine:
        return ToyEngine(toy_info(kv_slots=512))

    test_layers = EngineConformance.test_unsupported_outputs_are_refused_without_state_changes
    test_nothing = EngineConformance.test_only_requested_outputs_are_returned
    test_hidden_states = EngineConformance.test_a_row_has_one_hidden_state_however_it_is_reached
