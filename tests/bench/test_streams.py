"""Jobs of `specq bench gpu` as streams: how many and how long they are, their rates and latencies."""

import queue
from types import SimpleNamespace

import pytest

from bench.end_to_end import serving
from bench.end_to_end.streams import ListeningClient, Repetitions, Stream, StreamLoad, busy_rate, latencies
from bench.end_to_end.workload import Workload


def test_a_run_has_a_fixed_number_of_jobs_per_session_and_at_least_eight():
    work = Workload("pair", "cpu", [4], 8, 1, [[5], [6]], jobs_each=6)
    assert [len(work.prompts_for(sessions)) for sessions in (1, 2, 4)] == [8, 12, 24]
    assert len(Workload("pair", "cpu", [4], 8, 1, [[5], [6]]).prompts_for(4)) == 12


def test_lengths_are_spread_evenly_and_are_the_same_in_each_run():
    """And the KV memory holds them all."""
    even, spread = (Workload("pair", "cpu", [64], 100, 1, [[1]] * 65, length_spread=share) for share in (0.0, 0.3))
    assert even.lengths(5, 100) == [100] * 5
    lengths = spread.lengths(192, 100)
    assert lengths == spread.lengths(192, 100)
    assert lengths[:64] == spread.lengths(64, 100)
    assert (min(lengths), max(lengths)) == (70, 130)
    for first in range(0, 192, 64):
        assert abs(sum(lengths[first : first + 64]) / 64 - 100) < 2
    assert spread.lengths(3, 1) == [1, 1, 1]
    assert spread.kv_slots - even.kv_slots == sum(lengths) - 192 * 100

    asked = []
    client = SimpleNamespace(complete=lambda requests, *_: asked.extend(one["max_tokens"] for one in requests) or [])
    serving.Completer(client, StreamLoad(64), spread, "plain").complete([[1]] * 192, 100)
    assert asked == lengths


class _Scripted(ListeningClient):
    """A client whose jobs end when their ends are asked for, the last one first, and among them one that was asked for
    earlier."""

    def __init__(self):
        self.ended, self.running, self.most = self, [], 0

    def submit(self, *, seed):
        self.running.append(job := _ended_job(seed))
        self.most = max(self.most, len(self.running))
        if seed == 2:
            self.running.append(_ended_job(-1))
        return job

    def get(self, timeout):
        if not self.running:
            raise queue.Empty
        return self.running.pop()


def _ended_job(seed):
    return SimpleNamespace(id=seed, started=0.0, arrivals=[], result=lambda: SimpleNamespace(token_ids=[seed]))


def test_jobs_run_with_limited_concurrency_and_answers_keep_order():
    client = _Scripted()
    requests = [{"seed": seed} for seed in range(10)]
    assert [result.token_ids for _, result in client.complete(requests, 3, 1.0)] == [[seed] for seed in range(10)]
    assert client.most == 3
    assert not client.running
    client.submit = _ended_job  # none of them ends
    with pytest.raises(TimeoutError, match="none of 3 jobs ended in 1 s"):
        client.complete(requests, 3, 1.0)


def test_the_busy_rate_ends_when_the_last_job_is_asked_for():
    """Of three jobs, two at a time: six tokens of the first, two of the other by 3.0, when the third began, which does
    not count."""
    first, second = Stream([1] * 6, 1.0, [1.5, 2.0, 3.0]), Stream([1] * 4, 1.0, [2.0, 3.5])
    last = Stream([1] * 4, 3.0, [3.5, 4.0])
    assert busy_rate([first, second, last]) == [4.0]
    assert busy_rate([Stream([1, 2], 1.0, [2.0]), Stream([1, 2], 1.0, [2.0])]) == []
    assert busy_rate([Stream([1]), Stream([2])]) == []


def test_latencies_are_of_arrivals_not_of_tokens():
    """Three tokens that come together are one arrival; a token's time is all after the first arrival over all after the
    first token."""
    streams = [Stream([1, 2, 3, 4], 1.0, [1.5, 1.75]), Stream([1, 2], 2.0, [2.25, 2.75]), Stream([7])]
    expected = {"first_token_ms": 375.0, "itl_ms": 375.0, "itl_p99_ms": 500.0, "tpot_ms": pytest.approx(291.67)}
    assert latencies(streams) == {**expected, "tpot_p90_ms": 500.0}
    assert latencies([Stream([7])]) == {}


def test_the_99th_percentile_leaves_out_one_of_a_hundred_gaps():
    arrivals = [float(i) for i in range(100)]
    late = Stream([1] * 101, 0.0, [*arrivals, 150.0])
    assert latencies([late])["itl_p99_ms"] == 1000.0


def test_the_slowest_tenth_take_longer_than_the_90th_percentile():
    """Of ten completions, one."""
    ten = [Stream([1, 1], 0.0, [1.0, 1.0 + seconds]) for seconds in (9.0, *range(1, 9), 30.0)]
    assert latencies(ten)["tpot_p90_ms"] == 9000.0


def test_a_repetitions_rate_is_all_tokens_over_all_seconds():
    found = Repetitions(StreamLoad(2, 0.8))
    found.add(lambda: [Stream([1, 2]), Stream([3])])
    figures, (rate,) = found.figures(), found.rates
    assert rate == pytest.approx(3 / found.seconds)
    assert (figures["sessions"], figures["temperature"]) == (2, 0.8)
    assert figures["per_user"] == pytest.approx(rate / 2, abs=0.1)
