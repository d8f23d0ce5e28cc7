"""A line: delay, jitter, bandwidth, loss."""

import pytest

from specq.protocol.errors import ConfigError
from specq.simulate.machine import DelayLine, LineSettings
from tests.each import each


def send(line: DelayLine, *messages: tuple[float, int]) -> list[float]:
    return [time for now, size in messages for time in line.arrivals(now, size)]


def test_a_message_arrives_after_the_delay():
    assert send(DelayLine(LineSettings(delay_s=0.05)), (1.0, 100), (1.2, 10**6)) == pytest.approx([1.05, 1.25])


def test_messages_queue_for_bandwidth():
    """At 1000 bytes a second: 100 bytes take 0.1 s, the next begins after, and an idle line forgets."""
    line = DelayLine(LineSettings(delay_s=0.05, bytes_per_s=1000))
    assert send(line, (0.0, 100), (0.0, 200), (2.0, 100)) == pytest.approx([0.15, 0.35, 2.15])
    assert (line.num_messages, line.num_bytes) == (3, 400)


def test_jitter_has_its_mean_and_keeps_the_order():
    line = DelayLine(LineSettings(delay_s=0.01, jitter_s=0.02), seed=1)
    arrivals = send(line, *((float(i), 1) for i in range(4000)))
    late = [arrival - i for i, arrival in enumerate(arrivals)]
    assert min(late) >= 0.01
    assert sum(late) / len(late) == pytest.approx(0.03, rel=0.1)
    close = send(DelayLine(LineSettings(jitter_s=0.02), seed=1), *((i * 0.001, 1) for i in range(500)))
    assert close == sorted(close)


def test_order_is_lost_only_where_it_may_be():
    loose = send(DelayLine(LineSettings(jitter_s=0.02, in_order=False), seed=1), *((i * 0.001, 1) for i in range(500)))
    assert loose != sorted(loose)


def test_loss_and_doubling_have_their_chances():
    line = DelayLine(LineSettings(loss=0.2, double=0.5), seed=3)
    arrivals = send(line, *((float(i), 1) for i in range(5000)))
    assert line.num_lost / 5000 == pytest.approx(0.2, abs=0.02)
    assert len(arrivals) / 5000 == pytest.approx(0.8 * 1.5, abs=0.04)


def test_the_same_seed_gives_the_same_line():
    settings = LineSettings(delay_s=0.01, jitter_s=0.02, loss=0.1)
    runs = [send(DelayLine(settings, seed), *((float(i), 1) for i in range(50))) for seed in ("a", "a", "b")]
    assert runs[0] == runs[1] != runs[2]


@each("bad", [{"delay_s": -1}, {"loss": 1.5}, {"bytes_per_s": float("nan")}, {"double": -0.1}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LineSettings(**bad)
