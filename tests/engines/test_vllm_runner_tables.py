"""What vLLM's runner knows of requests while steps overlap: the same as the host, in few bytes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.step_delta import StepDelta
from specq.engines.vllm.versions import COUNTS
from specq.protocol import NO_TAP
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import VOCAB
from tests.devices import NEEDS_VLLM
from tests.engines.overlapping import GREEDY, plain, serve
from tests.engines.test_vllm_arrays import chain
from tests.engines.vllm_services import engine, opened, overlapping, started

__all__ = ["engine", "started"]  # fixtures


pytestmark = NEEDS_VLLM


class Watched:
    """Messages to an engine's workers, each plan as it travels; and whether vLLM's runner then knows of each request
    what the host does."""

    def __init__(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        from specq.engines.vllm.patches.token_injection import FILL

        self._sessions: Any = engine._sessions
        self._runner = self._sessions._core.model_executor.driver_worker.worker.model_runner
        self.plans: list[StepDelta] = []
        self._launch, self._update = self._sessions._workers.launch, self._runner._update_states
        monkeypatch.setattr(self._sessions._workers, "launch", self._note)
        monkeypatch.setattr(self._runner, "_update_states", self._check)
        self._fill = getattr(self._runner, FILL)
        monkeypatch.setattr(self._runner, FILL, self._check_rows)

    def _note(self, delta: StepDelta) -> None:
        self.plans.append(pickle.loads(pickle.dumps(delta)))
        self._launch(self.plans[-1])

    def _check(self, output: Any) -> Any:
        found = self._update(output)
        batch, flight = self._runner.input_batch, self._sessions._newest
        members, table, steps = flight.members, self._sessions._table, flight.batch
        assert sorted(batch.req_ids) == sorted(members.request_ids)
        fed = np.full(len(steps), -1) if steps.fed_by is None else steps.fed_by
        for i, (name, holding, place) in enumerate(
            zip(members.request_ids, members.holdings, members.places.tolist(), strict=True)
        ):
            row, blocks = batch.req_id_to_index[name], self._sessions._scheduler.kv_cache_manager.get_block_ids(name)
            assert batch.num_computed_tokens_cpu[row] == steps.starts[i]
            assert self._runner.requests[name].block_ids == blocks
            assert batch.block_table[0].block_table.np[row, : len(blocks[0])].tolist() == blocks[0]
            unsaid = table.unsaid[place, : table.num_unsaid[place]].tolist()
            text = [*holding.request.all_token_ids, *unsaid]
            length = int(steps.base_lens[i]) - (fed[i] >= 0)
            assert batch.token_ids_cpu[row, :length].tolist() == text[:length]
        return found

    def _check_rows(self, output: Any, *arguments: Any) -> None:
        """The rows of each request have its tokens and its drafts, but for the one that the device alone knows."""
        self._fill(output, *arguments)
        steps, first = self._sessions._newest.batch, 0
        places = {name: i for i, name in enumerate(self._sessions._newest.members.request_ids)}
        for name in self._runner.input_batch.req_ids:
            i, size = places[name], output.num_scheduled_tokens[name]
            known = int(steps.fed_by is not None and steps.fed_by[i] >= 0)
            own = steps.token_ids[steps.ends[i] - steps.sizes[i] : steps.ends[i]].tolist()
            assert self._runner.input_ids.np[first : first + size].tolist()[known : len(own)] == own[known:]
            first += size


def of_services(test: Any) -> Any:
    """Run a test with services by `serve`: of some seeds, with and without a penalty."""
    return pytest.mark.parametrize("penalty", [0.7, 0.0])(pytest.mark.parametrize("seed", range(3))(test))


def check_many_go_on(num: int, num_steps: int, penalty: float) -> None:
    """Of a service's steps some go on and some do not, with a penalty perhaps none."""
    assert num < num_steps - 10
    assert penalty or num > 10


@of_services
def test_the_runner_knows_what_the_host_knows(
    engine: VllmEngine, seed: int, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all changes of sessions: plans with only the differences leave the runner in the state of full plans."""
    watched = Watched(engine, monkeypatch)
    serve(engine, seed, penalty)
    check_many_go_on(sum(delta.batch is None for delta in watched.plans), len(watched.plans), penalty)


def test_the_runner_knows_what_the_host_knows_of_chains(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted or not, beside sessions without drafts, and in the step behind."""
    Watched(overlapping(engine, False), monkeypatch)
    rng, texts = np.random.default_rng(5), {i: [i + 1, 2] for i in range(4)}
    for session_id, text in texts.items():
        engine.open(session_id, np.array(text, np.int32))
    for _ in range(60):
        joining = [i for i in texts if rng.random() < 0.8]
        steps = []
        for i in joining:
            start = int(engine._sessions.lengths([i])[0])
            tree = chain(rng.integers(0, VOCAB, rng.integers(0, 4)).tolist() if rng.random() < 0.6 else [])
            steps.append(SessionStep(i, start, np.array(texts[i][start:], np.int32), GREEDY, tree))
        for i, judgement in zip(joining, engine.step(steps).judgements if steps else (), strict=True):
            texts[i] += judgement.token_ids.tolist()


class Counted:
    """Steps for which the device counts on by itself, each compared with what vLLM's runner makes of the same step."""

    def __init__(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        from specq.engines.vllm.patches.decode_fast_path import PREPARE

        steps: Any = engine._sessions._core.model_executor.driver_worker.worker.specq_steps  # type: ignore[attr-defined]
        self._fast_path, self._runner = steps._fast_path, steps._runner
        table = self._runner.input_batch.block_table[0].block_table
        if table.gpu.device.type == "cpu":  # there it is what the host writes; elsewhere captured graphs read it
            monkeypatch.setattr(table, "gpu", table.gpu.clone())
        self.num_steps, self.num_counted, self.num_grown, self.nums = 0, 0, 0, set[int]()
        self._go_on, self._prepare = self._fast_path._go_on, self._fast_path._prepare
        self._asked: tuple[Any, Any] | None = None
        prepare = getattr(self._runner, PREPARE)

        def noted(output: Any, num_scheduled: Any, *arguments: Any) -> Any:
            self._asked = output, num_scheduled
            self.num_steps += 1
            return prepare(output, num_scheduled, *arguments)

        monkeypatch.setattr(self._runner, PREPARE, noted)
        monkeypatch.setattr(self._fast_path, "_go_on", self._count_and_compare)

    def _made(self, num: int) -> dict[str, list[Any]]:
        """What a step of so many requests depends on, but for its tokens."""
        blocks = self._runner.input_batch.block_table[0]
        parts = {name: getattr(self._runner, name) for name in COUNTS} | {"slots": blocks.slot_mapping.gpu}
        made = {name: part[:num].tolist() for name, part in parts.items()}
        used = blocks.num_blocks_per_row[:num].tolist()
        rows = blocks.block_table.gpu[:num].tolist()
        made["blocks"] = [row[:count] for row, count in zip(rows, used, strict=True)]
        return made | {"firsts": self._runner.query_start_loc.gpu[: num + 1].tolist()}

    def _count_and_compare(self, num: int, *, has_blocks: bool) -> None:
        self._go_on(num, has_blocks=has_blocks)
        found, fed = self._made(num), self._runner.input_ids.gpu[:num].clone()
        assert self._asked is not None
        prepared = self._prepare(*self._asked)
        assert found == self._made(num)
        assert prepared[0].tolist() == [*range(num)]
        self._runner.input_ids.gpu[:num].copy_(fed)
        self.num_counted += 1
        self.num_grown += has_blocks
        self.nums.add(num)


@of_services
def test_the_device_counts_as_the_runner_does(
    engine: VllmEngine, seed: int, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests go on; where one comes, ends, waits or was forgotten the runner prepares the step."""
    counted_steps = Counted(engine, monkeypatch)
    serve(engine, seed, penalty)
    check_many_go_on(counted_steps.num_counted, counted_steps.num_steps, penalty)
    assert penalty or len(counted_steps.nums) > 2


def say(flight: Any) -> list[int]:
    """Collect a step; return the one token of each session."""
    return [int(token) for one in flight.collect().judgements for (token,) in [one.token_ids]]


def test_requests_stand_where_they_are_fed_wherever_the_batch_has_them(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions in another order than their rows are fed and judged by their own, in blocks of KV that they take on the
    way."""
    counted_steps, said = Counted(engine, monkeypatch), []
    for overlaps, order in ((True, [2, 0, 1]), (False, [0, 1, 2])):
        opened(overlapping(engine, overlaps), 3)
        texts, tokens, flight = {i: list[int]() for i in order}, [2, 2, 2], None
        for turn in range(70):
            batch = plain(order, [1 + turn] * 3, tokens, [0, 1, 2] if overlaps and turn else None)
            launched = engine.launch(batch, NO_TAP, flight)
            collected = flight if overlaps else launched
            if collected is not None:
                tokens = say(collected)
                for i, token in zip(order, tokens, strict=True):
                    texts[i].append(token)
            flight = launched if overlaps else None
        if flight is not None:
            for i, token in zip(order, say(flight), strict=True):
                texts[i].append(token)
        said.append(texts)
        for session_id in order:
            engine.close(session_id)
    assert said[0] == said[1]
    assert counted_steps.num_counted == 69
    assert counted_steps.num_grown


def test_a_step_behind_one_that_was_discarded_counts_from_where_it_starts(engine: VllmEngine) -> None:
    """The runner prepares it: what the device counted for the discarded one is not there."""
    said = []
    for num_discarded in (0, 1):
        opened(engine, 2)
        flight = engine.launch(plain([0, 1], [1, 1], [2, 2]))
        texts = list[list[int]]()
        for turn in range(2, 6):
            for _ in range(num_discarded):
                engine.launch(plain([0, 1], [turn, turn], [9, 9], [0, 1]), NO_TAP, flight).discard()
            after, flight = flight, engine.launch(plain([0, 1], [turn, turn], [9, 9], [0, 1]), NO_TAP, flight)
            texts.append(say(after))
        texts.append(say(flight))
        said.append(texts)
        for session_id in (0, 1):
            engine.close(session_id)
    assert said[0] == said[1]


def test_a_continued_step_takes_a_few_bytes(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sessions there are."""
    watched, flight = Watched(engine, monkeypatch), None
    for count in (1, 20):
        opened(engine, count)
        for turn in range(8):
            tokens = [2] * count
            batch = plain([*range(count)], [1 + turn] * count, tokens, [*range(count)] if turn else None)
            after, flight = flight, engine.launch(batch, NO_TAP, flight)
            if after is not None:
                after.collect()
        assert flight is not None
        flight.collect()
        flight = None
        sizes = [len(pickle.dumps(plan)) for plan in watched.plans[-7:]]
        assert max(sizes) < 300, sizes
        for session_id in range(count):
            engine.close(session_id)
