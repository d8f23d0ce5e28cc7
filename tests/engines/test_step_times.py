"""Step times at start-up: measured or estimated, and a cache of learned times whose errors are harmless."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from specq.engines import profiling
from specq.engines.native import PassWork
from specq.engines.profiling import keep, least_kv_slots, one_row_step_s, recall, step_times, step_times_file
from specq.engines.room import free_slots
from specq.protocol import ConfigError
from specq.testing.toy import ToyEngine, toy_info
from specq.verifier import StepCurve, profiled_rows
from tests.each import each

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_where_an_engines_steps_jump_both_sides_are_measured():
    """Sixteen rows go in two tiles and seventeen in three; a line from 16 to 24 rows would hide what the first draft
    costs. A jump beyond the most rows is not measured."""
    rows = profiled_rows((8, 16), 40)
    assert {8, 9, 16, 17} <= set(rows)
    assert rows == sorted(set(rows))
    assert rows[-1] <= 40
    curve = StepCurve(rows, [-(-size // 8) * 1.0 for size in rows])
    assert (curve(16), curve(17)) == (2.0, 3.0)
    assert profiled_rows((512,), 512)[-1] == 512
    assert profiled_rows((), 4) == [1, 2, 4]


def one_row(engine, sizes):
    return [one_row_step_s(engine)]


@each(
    ("measure", "sizes", "least"),
    [
        (one_row, [1], 2),
        (step_times, SIZES, 512 + 8 * 7),
        (step_times, [1, 2, 4], 4 + 4 * 7),
    ],
)
def test_too_few_kv_slots_are_refused_with_the_fewest_that_do(measure, sizes, least):
    for kv_slots in (1, least - 1):
        said = f"toy has {kv_slots} KV slots .--kv-slots.; give at least {least}, .* rows"
        with pytest.raises(ConfigError, match=said):
            measure(ToyEngine(toy_info(kv_slots=kv_slots)), sizes)
    engine = ToyEngine(toy_info(kv_slots=least))
    assert len(measure(engine, sizes)) == len(sizes)
    assert not engine.contexts


@pytest.mark.parametrize("block_slots", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("num_sessions", [1, 5, 8])
def test_the_fewest_kv_slots_are_counted_in_blocks(block_slots, num_sessions):
    """Seven tokens of each session stand before the step: in one block, which has room for more, or in several."""
    before = -(-7 // block_slots)
    slacks = np.full(num_sessions, before * block_slots - 7)
    for num_rows in (num_sessions, 40, 512):
        num_blocks, rest = divmod(least_kv_slots(num_rows, 8, num_sessions, block_slots), block_slots)
        assert rest == 0
        left = num_blocks - num_sessions * before
        assert free_slots(left, block_slots, slacks) >= num_rows
        assert left == 0 or free_slots(left - 1, block_slots, slacks) < num_rows


@each(("is_integer", "least", "most"), [(False, 2.5, 6.0), (True, 1.5, 3.0)])
def test_what_a_pass_takes_follows_from_one_row_and_from_bytes_and_products(is_integer, least, most):
    """A model with four bits a weight: few rows take as long as one, many take their products."""
    work = PassWork(num_bytes=600_000_000, num_weights=10**9, is_integer=is_integer)
    for num_threads in (1, 2):
        one, eight, many, twice = work.seconds([1, 8, 256, 512], num_threads, 0.05)
        assert one == pytest.approx(0.05)
        assert least < eight / one < most
        assert twice / many == pytest.approx(2, rel=0.01)


def test_a_disturbed_size_does_not_make_larger_steps_dearer_or_rows_free():
    """What disturbs a measurement adds to it: a larger size that took less says that it was disturbed."""
    quiet, disturbed = StepCurve([1, 2, 4, 8], [1.0, 1.1, 1.3, 1.7]), StepCurve([1, 2, 4, 8], [1.5, 1.1, 1.3, 1.7])
    assert disturbed(1) == disturbed(2) == quiet(2)
    assert disturbed.slope(2) == quiet.slope(2)
    assert StepCurve([1, 2, 4, 8], [1.0, 1.1, 2.9, 1.7])(4) == quiet(8)


def test_a_broken_cache_is_as_none():
    path = step_times_file("model")
    keep(path, {1: 0.1, 8: 0.2})
    assert recall(path) == {1: 0.1, 8: 0.2}
    for broken in (
        "",
        "{",
        "[1, 2]",
        '{"1": -1, "8": 2}',
        '{"8": 1, "1": 1}',
        '{"1": 1}',
        '{"a": 1}',
        '{"1": NaN, "2": 1}',
    ):
        path.write_text(broken)
        assert recall(path) == {}, broken


def test_each_model_and_machine_has_a_file_and_there_are_not_too_many(monkeypatch):
    monkeypatch.setattr(profiling, "MOST_FILES", 3)
    paths = [step_times_file("machine", number) for number in range(6)]
    assert len(set(paths)) == 6
    for path in paths:
        keep(path, {1: 0.1, 8: 0.2})
        assert recall(path)
    assert len(list(paths[0].parent.iterdir())) == 3


def test_the_file_that_was_just_written_is_the_newest(monkeypatch):
    """Also where others were written while the clock was a month ahead: the oldest go first."""
    monkeypatch.setattr(profiling, "MOST_FILES", 3)
    ahead_ns = time.time_ns() + 30 * 86400 * 10**9
    paths = [step_times_file("machine", number) for number in range(8)]
    for place, path in enumerate(paths):
        keep(path, {1: 0.1, 8: 0.2})
        if place == 3:
            os.utime(path, ns=(ahead_ns, ahead_ns))
        assert [bool(recall(other)) for other in paths[max(0, place - 2) : place + 1]] == [True] * min(place + 1, 3)


def test_an_unwritable_cache_is_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "steps" / "x.json", {1: 0.1, 8: 0.2})


def test_beyond_what_was_measured_the_slope_is_learned_and_small_steps_stay_as_they_are():
    """The engine's large steps cost a third of what the line says: it bends there, and nowhere else."""
    curve = StepCurve([1, 32, 64], [0.01, 0.04, 0.07])
    rng, small = np.random.default_rng(0), [curve(rows) for rows in range(1, 65)]
    assert curve(512) == pytest.approx(0.07 + 448 * 0.03 / 32, rel=0.05)
    for rows in rng.integers(100, 512, 300).tolist():
        curve.learn_slope(rows, 0.07 + (rows - 64) * 0.01 / 32)
    assert curve(512) == pytest.approx(0.07 + 448 * 0.01 / 32, rel=0.05)
    assert [curve(rows) for rows in range(1, 65)] == small
    np.testing.assert_allclose(curve.times(60, 10), [curve(rows) for rows in range(60, 70)])


def test_one_strange_step_does_not_turn_the_line_over():
    curve = StepCurve([1, 64], [0.01, 0.07])
    before = curve(512)
    curve.learn_slope(512, 1000.0)
    assert curve(512) < 2 * before
    for _ in range(100):
        curve.learn_slope(512, 0.0)
    assert curve(512) >= curve(64)
