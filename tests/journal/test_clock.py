"""The journal's time against what only the test knows: the seconds in which the machine was up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specq.broker import Broker
from specq.journal import Clocks, Journal, MachineClock, Noted, Opening, offset_of, open_journal
from specq.journal.interface import NOTE_S
from specq.journal.sqlite.connection import connect
from specq.testing.fake_journal import ended, taken
from specq.testing.toy import toy_text
from tests.journal.scene import Scene

MONTH_S = 30 * 86400.0
YEAR_S = 365 * 86400.0
STEPS_S = (MONTH_S, -MONTH_S, 0.0, YEAR_S, -40 * YEAR_S, 3600.0, -1.0)
KEEP_S = 7 * 86400.0
DEADLINE_S = 2 * 86400.0
SLEPT_S = 300.0  # before the first broker: the uptime counts it, the monotonic clock does not
BOOT_S = 20.0  # from the boot to the broker's start
TOLERANCE_S = 1.0


class Computer:
    """A machine that is up, off, and up again, with a wall clock that somebody sets; `up_s` is the truth."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.up_s, self.boot, self.since_boot, self.wall = rng, 5e3, 1, 5e3, 1.78e9

    def clocks(self) -> Clocks:
        return Clocks(self.since_boot, self.wall, MachineClock(f"boot {self.boot}", self.since_boot + SLEPT_S))

    def run(self, seconds: float) -> None:
        self.up_s, self.since_boot, self.wall = self.up_s + seconds, self.since_boot + seconds, self.wall + seconds

    def step(self) -> None:
        """Set the wall clock."""
        self.wall += self.rng.choice(STEPS_S)

    def reboot(self) -> None:
        self.wall += self.rng.choice((10.0, 3600.0, 3 * KEEP_S))
        self.boot, self.since_boot = self.boot + 1, BOOT_S
        self.up_s += BOOT_S


class Story:
    """A journal over the machine's life, and the truth about its jobs: when they were submitted or ended, in `up_s`."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng, self.path = random.Random(seed), path
        self.machine = Computer(self.rng)
        self.ended: dict[int, float] = {}
        self.submitted: dict[int, float] = {}
        self.reboots: list[float] = []
        self.next_id, self.noted_s = 1, 0.0
        self.journal = self._open()

    def _open(self) -> Journal:
        return open_journal(str(self.path), Opening(durability="process", clocks=self.machine.clocks()))

    @property
    def now(self) -> float:
        return self.machine.since_boot + self.journal.offset

    def add(self, *, has_ended: bool) -> None:
        """Journal a job that ends at once, or has a deadline."""
        job_id, self.next_id = self.next_id, self.next_id + 1
        record = taken(job_id, self.now)._replace(deadline=0.0 if has_ended else self.now + DEADLINE_S)
        self.journal.write([record, ended(job_id, [5], at=self.now)] if has_ended else [record])
        (self.ended if has_ended else self.submitted)[job_id] = self.machine.up_s

    def run(self, seconds: float) -> None:
        """Let time pass; the time is noted as the writer does."""
        self.machine.run(seconds)
        self.noted_s += seconds
        if self.noted_s >= NOTE_S:
            ago_s, machine = self.rng.uniform(0, NOTE_S), self.machine.clocks().machine  # a crash may come at any time
            self.journal.note_time(Noted(self.now - ago_s, machine._replace(uptime=machine.uptime - ago_s)))
            self.noted_s = 0.0

    def restart(self, *, reboots: bool) -> None:
        """End the broker, perhaps with the machine, set the wall clock, and start the next broker."""
        self.journal.close()
        self.machine.step()
        if reboots:
            self.machine.reboot()
            self.reboots.append(self.machine.up_s)
        else:
            self.machine.run(self.rng.choice((1.0, 7200.0)))
        self.journal = self._open()

    def lost_s(self, since: float) -> float:
        """Return how much time the reboots since then may have lost at most."""
        return sum(at > since for at in self.reboots) * (2 * NOTE_S + BOOT_S) + TOLERANCE_S

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check_results(self) -> None:
        """Nothing young is forgotten, and nothing old is kept; the order is that in which the jobs ended."""
        while self.journal.keep_to(1 << 40, self.now - KEEP_S).num_forgotten:
            pass
        reader = self.journal.reader()
        kept = [one.job_id for one in reader.finished(10_000)]
        reader.close()
        assert kept == [job_id for job_id in reversed(self.ended) if job_id in kept]
        for job_id, at in list(self.ended.items()):
            age_s = self.machine.up_s - at
            assert job_id in kept or age_s > KEEP_S - TOLERANCE_S, f"forgotten after {age_s} s"
            assert job_id not in kept or age_s < KEEP_S + self.lost_s(at), f"kept for {age_s} s"
            if job_id not in kept:
                del self.ended[job_id]

    def check_deadlines(self) -> None:
        """A broker that starts now ends the jobs that are overdue, and no others."""
        broker = Broker(incarnation=0, has_journal=True, epoch=self.journal.epoch, offset=self.journal.offset)
        broker.restore(self.journal.unfinished(), self.machine.since_boot)
        broker.tick(self.machine.since_boot)
        for job_id, at in list(self.submitted.items()):
            age_s, waits = self.machine.up_s - at, job_id in broker.state.jobs.active
            assert waits or age_s > DEADLINE_S - TOLERANCE_S, f"ended after {age_s} s"
            assert not waits or age_s < DEADLINE_S + self.lost_s(at), f"waits for {age_s} s"
            if not waits:
                self.journal.write([ended(job_id, [5], at=self.now)])
                del self.submitted[job_id]
                self.ended[job_id] = self.machine.up_s


def tell(story: Story, num_events: int) -> None:
    """Let things happen at random, and check after each."""
    for _ in range(num_events):
        event = story.rng.random()
        if event < 0.6:
            story.add(has_ended=event < 0.4)
        elif event < 0.75:
            story.machine.step()
        elif event < 0.9:
            story.restart(reboots=event > 0.83)
        story.run(story.rng.choice((5.0, 50.0, 3600.0, 86400.0)))
        story.check_results()
        story.check_deadlines()


def test_no_step_of_the_wall_clock_moves_what_is_stored(tmp_path: Path) -> None:
    """While brokers run, between them, and across reboots: results and deadlines live as long as they should."""
    for seed in range(3):
        story = Story(tmp_path / str(seed), seed)
        tell(story, 80)
        assert story.reboots
        assert story.next_id > len(story.ended) + len(story.submitted) + 10, "some were forgotten"
        story.journal.close()


def test_planted_wall_clocks_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that follows the wall clock at each start, and one that begins anew at each boot."""

    def by_wall(clocks: Clocks, noted: Noted | None, newest: float) -> float:
        return clocks.wall - clocks.monotonic

    def by_boot(clocks: Clocks, noted: Noted | None, newest: float) -> float:
        is_same = noted is not None and noted.machine.boot == clocks.machine.boot
        return offset_of(clocks, noted, newest) if is_same else 1e9

    for name, bug in (("wall", by_wall), ("boot", by_boot)):
        monkeypatch.setattr("specq.journal.sqlite.connection.offset_of", bug)
        story = Story(tmp_path / name, 1)
        with pytest.raises(AssertionError):
            tell(story, 80)
        story.journal.close()


def test_how_the_time_goes_on() -> None:
    """By the uptime of a boot, and never back; from times of the wall clock, or from now if that is earlier."""

    def start(noted: Noted | None, newest: float = 0.0, boot: str = "b") -> float:
        return offset_of(Clocks(100.0, 1e9, MachineClock(boot, 900.0)), noted, newest) + 100.0

    assert [start(None), start(None, 9e8), start(None, 2e9)] == [1e9, 9e8, 1e9]
    assert start(Noted(7e8, MachineClock("b", 850.0))) == 7e8 + 50.0
    assert start(Noted(7e8, MachineClock("b", 5000.0))) == 7e8  # a container whose uptime began anew
    assert start(Noted(7e8, MachineClock("a", 850.0)), 2e9) == 7e8
    assert start(Noted(7e8, MachineClock("", 850.0)), 0.0, boot="") == 7e8  # a system that names no boots


def test_a_journal_with_times_of_the_wall_clock_is_taken_over(tmp_path: Path) -> None:
    """A former version wrote it while its wall clock was a month ahead: nothing young goes, nothing stays for ever.

    Jobs keep their order, and what is left until their deadlines.
    """
    path, real = tmp_path / "journal", 1.78e9
    old = open_journal(str(path), Opening(clocks=Clocks(1.0, real, MachineClock("a", 1.0))))
    old.write([taken(1, real), ended(1, [5], at=real + 1.0)])
    ahead = real + MONTH_S
    old.write([taken(2, ahead)._replace(deadline=ahead + 50.0), taken(3, ahead + 9.0)._replace(deadline=0.0)])
    old.write([taken(4, ahead + 2.0), ended(4, [5], at=ahead + 10.0), taken(5, ahead), ended(5, [5], at=ahead + 12.0)])
    old.close()
    connection = connect(path)
    connection.execute("DELETE FROM meta WHERE name IN ('time', 'boot', 'uptime')")
    connection.close()

    now = real + 60.0
    journal = open_journal(str(path), Opening(clocks=Clocks(500.0, now, MachineClock("b", 500.0))))
    assert journal.offset + 500.0 == now
    assert journal.keep_to(1 << 40, now - KEEP_S).num_forgotten == 0
    assert [one.job_id for one in journal.reader().finished(10)] == [5, 4, 1]
    second, third = journal.unfinished()
    assert [second.submit.job_id, third.submit.job_id] == [2, 3]
    assert [second.deadline, third.deadline] == [now + 50.0, 0.0]
    assert now - 1.0 < second.submitted < third.submitted <= now
    assert journal.keep_to(1 << 40, now + 0.1).num_forgotten == 3
    journal.close()


def test_an_epoch_of_another_clock_delays_no_job() -> None:
    """A verifier has a session of a broker whose clock was ahead, and which had no journal: the next opens it anew."""
    text = toy_text([5, 6, 7], 26)
    for epoch in (1 << 40, 1 << 62, (1 << 63) - 1):
        for length in (0, 9, 26):
            scene = Scene()
            scene.verifier.sessions[1] = (epoch, [5, 6, 7, *text[:length]], 3 + 26)
            scene.submit(1, [5, 6, 7], 26)
            scene.run(lambda scene=scene: scene.ended(1), most_turns=60)
            assert scene.texts() == {1: text}
