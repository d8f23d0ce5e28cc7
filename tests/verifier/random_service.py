"""A verifier served at random: sessions come, end, are closed and opened again, drafted for and acknowledged late, and
steps fail. What it says is compared with what the toy target says."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from specq.drafting.draft_model.source import ColocatedSource
from specq.engines.checks import PROBE
from specq.protocol.messages import Ack, Close, Draft, Open, SessionFailed, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.step_output import NO_TAP, StepOutput
from specq.testing.late import LateEngine, LateStep
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer, UnreadToyChains
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.validation import validate

MOST_STEPS = 3000


class FailingLater(LateEngine):
    """Steps with a session of `bad` raise, whenever they are collected."""

    bad: set[int]
    num_refused = 0  # launches that raise next
    broken_rule = ""  # by a launch: a verifier takes what is raised then for a failure, and goes on

    def launch(self, steps, tap=NO_TAP, after=None):  # type: ignore[no-untyped-def]
        if self.num_refused and [step.session_id for step in steps] != [PROBE]:
            self.num_refused -= 1
            raise RuntimeError("once")
        try:
            return super().launch(steps, tap, after)
        except AssertionError as error:
            self.broken_rule = str(error)
            raise

    def collect(self, late: LateStep) -> StepOutput:
        if late.batch.session_ids == [PROBE]:
            late.error = None
        if self.bad.intersection(late.batch.session_ids) - late.closed:
            late.error = ValueError("a bad session")
        return super().collect(late)


class FailingAtOnce(ToyEngine):
    """The same, without overlap."""

    bad: set[int]
    is_apart: bool

    def step(self, steps, tap=None):  # type: ignore[no-untyped-def]
        if self.bad.intersection(step.session_id for step in steps):
            raise ValueError("a bad session")
        return super().step(steps)


@dataclass
class Job:
    """A session as the broker knows it, and what its text must become."""

    session_id: int
    epoch: int
    prompt: list[int]
    limit: int
    params: SamplingParams
    mode: str
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    def expected(self) -> tuple[list[int], str]:
        text = toy_text(self.prompt, self.limit, self.params.seed)
        stops = [i for i, token in enumerate(text) if token in self.params.stop_token_ids]
        return (text[: stops[0] + 1], "stop") if stops else (text, "length")

    def opening(self) -> Open:
        """Return the message that opens it where it stands."""
        return Open(
            session_id=self.session_id, epoch=self.epoch, prompt_len=len(self.prompt),
            tokens_left=self.limit - len(self.tokens), params=self.params, speculation=Speculation(mode=self.mode),
            token_ids=np.array(self.prompt + self.tokens, np.int32), is_background=self.session_id % 3 == 0,
        )  # fmt: skip


class Service:
    """The verifier, and its messages for each open job."""

    def __init__(
        self, random: Random, *, overlaps: bool = True, is_apart: bool = False, has_chains: bool = False
    ) -> None:
        self.random, self.now = random, 0.0
        kind = FailingLater if overlaps else FailingAtOnce
        self.engine = kind(toy_info(kv_slots=random.choice([60, 90, 400])))
        self.engine.bad = set()
        self.engine.is_apart = is_apart
        self.chains = UnreadToyChains(ToyProposer(wrong_every=random.choice([0, 3, 5])) if has_chains else None)
        self.verifier = Verifier(
            self.engine,
            StepCurve([1, 64], [0.005, 0.01]),
            [self._drafter()] if has_chains else [],
            incarnation=1,
            max_sessions=random.choice([1, 2, 4, 64]),
            max_step_rows=random.choice([6, 20, 200]),
            max_uncommitted=random.choice([3, 10, 1000]),
            measures_drafts=random.random() < (0.2 if has_chains else 0.5),
        )
        if random.random() < 0.5:
            self.verifier.control._awaits_histories = lambda *_: False
        self.jobs: dict[int, Job] = {}
        self.texts: dict[int, tuple[list[int], str]] = {}  # of all that ended
        self.num_opened = self.num_tokens = 0

    def _drafter(self) -> ColocatedSource:
        levels, width = StepCurve([1, 64], [0.0002, 0.0002]), self.random.choice([1, 3])
        is_unread = self.random.choice([True, True, True, None])
        return ColocatedSource(self.chains, levels, chain=4, fan_out=width, is_unread=is_unread)

    def act(self) -> None:
        """Do something, and step now and then."""
        does = (
            [self.open] * 3
            + [self.close, self.reopen, self.fail, self.refuse, self.spoil, self.lose]
            + [self.acknowledge, self.draft] * 2
            + [self.step] * 6
        )
        self.random.choice(does)()

    def open(self) -> None:
        self.num_opened += 1
        prompt = [1 + self.random.randrange(3)] * self.random.choice([1, 3, 17, 30])
        stops = tuple(self.random.sample(range(1, 50), self.random.choice([0, 0, 3, 8])))
        params = SamplingParams(
            seed=self.random.randrange(3), stop_token_ids=stops, presence_penalty=self.random.choice([0, 0, 0, 0.1]),
            logprobs=self.random.choice([-1, -1, 0]),
        )  # fmt: skip
        mode = self.random.choice(["plain", "plain", "async", "async", "sync", "jit"])
        job = Job(self.num_opened, 1, prompt, self.random.randrange(1, 25), params, mode)
        self.jobs[job.session_id] = job
        assert self.verifier.handle(job.opening(), self.now) == []

    def some(self) -> Job | None:
        return self.random.choice(list(self.jobs.values())) if self.jobs else None

    def close(self, job: Job | None = None) -> None:
        if job := job or self.some():
            self.verifier.handle(Close(session_id=job.session_id, epoch=job.epoch), self.now)
            del self.jobs[job.session_id]

    def reopen(self) -> None:
        """As after a takeover: with a new epoch, from what the broker has."""
        if (job := self.some()) and not job.finish:
            job.epoch += 1
            assert self.verifier.handle(job.opening(), self.now) == []

    def fail(self) -> None:
        """Let one of the next steps fail once, with any sessions in it."""
        if isinstance(self.engine, LateEngine) and not self.engine.failing:
            self.engine.failing[self.engine.num_launched + self.random.randrange(1, 4)] = RuntimeError("once")

    def refuse(self) -> None:
        """Let the next launch raise, or the next two."""
        if isinstance(self.engine, FailingLater):
            self.engine.num_refused = self.random.choice([1, 2])

    def spoil(self) -> None:
        """Let all further steps with some session fail."""
        if (job := self.some()) and not job.finish and self.random.random() < 0.3:
            self.engine.bad.add(job.session_id)

    def lose(self) -> None:
        """Let the next chains fail when they are read."""
        self.chains.failing[len(self.chains.num_started) + 1] = RuntimeError("lost")

    def acknowledge(self) -> None:
        if job := self.some():
            length = len(job.prompt) + len(job.tokens)
            resend = self.random.random() < 0.2
            ack = Ack(session_id=job.session_id, epoch=job.epoch, length=length, resend=resend)
            for verdict in self.verifier.handle(ack, self.now):
                self.hear(verdict, again=True)

    def draft(self) -> None:
        """Send a chain that is right up to some place, from where the broker believes that the text stands, or a little
        before."""
        job = self.some()
        if job is None or job.mode == "plain" or job.finish:
            return
        text = toy_text(job.prompt, job.limit + 8, job.params.seed)
        back = self.random.randrange(2)
        start = max(0, len(job.tokens) - back)
        tokens = text[start : start + self.random.randrange(1, 5)]
        if self.random.random() < 0.5:
            tokens[-1] = 1 + tokens[-1] % 49
        message = Draft(
            session_id=job.session_id, epoch=job.epoch, lane=0, base_len=len(job.prompt) + start,
            first_id=self.random.randrange(10**6), token_ids=np.array(tokens, np.int32),
            parent_ids=np.arange(-1, len(tokens) - 1, dtype=np.int32), scores=np.full(len(tokens), -0.1, np.float16),
        )  # fmt: skip
        self.verifier.handle(message, self.now)

    def step(self) -> None:
        self.verifier.begin(self.now)
        if not self.verifier.has_work:
            return
        for message in self.verifier.step(self.clock):
            self.hear(message)
        assert not getattr(self.engine, "broken_rule", ""), self.engine.broken_rule
        validate(self.verifier)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def hear(self, message: object, *, again: bool = False) -> None:
        if isinstance(message, SessionFailed):
            self.take_back(message)
            return
        assert isinstance(message, Verdict)
        job = self.jobs[message.session_id]  # nothing is said of what is closed
        assert message.epoch == job.epoch
        tokens = message.token_ids.tolist()
        assert message.base_len == len(job.prompt) + len(job.tokens)
        assert not job.finish or again
        assert tokens or again
        job.tokens += tokens
        self.num_tokens += len(tokens)
        text, finish = job.expected()
        assert job.tokens == text[: len(job.tokens)]
        job.finish = message.finish
        assert bool(job.finish) == (job.tokens == text)
        assert job.finish in ("", finish)

    def take_back(self, message: SessionFailed) -> None:
        """Open a session again that was in nothing but bad company, as a broker does; one that is bad itself is given
        up."""
        job = self.jobs[message.session_id]
        assert message.retry
        assert message.epoch == job.epoch
        assert not job.finish
        if job.session_id in self.engine.bad:
            del self.jobs[job.session_id]
            return
        assert message.reason.endswith("once")
        job.epoch += 1
        assert self.verifier.handle(job.opening(), self.now) == []

    def end(self) -> None:
        """Serve until all has ended."""
        for _ in range(MOST_STEPS):
            for job in list(self.jobs.values()):
                if job.finish:
                    self.close(job)
                else:
                    length = len(job.prompt) + len(job.tokens)
                    self.verifier.handle(Ack(session_id=job.session_id, epoch=job.epoch, length=length), self.now)
            self.verifier.heartbeat()
            if not self.jobs and not self.verifier.has_work:
                break
            self.step()
        assert not self.jobs
        assert self.engine.free_slots == self.engine.info.kv_slots
        assert self.verifier.trees.num_nodes == 0


def serve(
    random: Random, num_acts: int, *, overlaps: bool = True, is_apart: bool = False, has_chains: bool = False
) -> Service:
    """Serve at random; raises AssertionError where what is said is not what the target says."""
    service = Service(random, overlaps=overlaps, is_apart=is_apart, has_chains=has_chains)
    for _ in range(num_acts):
        service.act()
    service.end()
    return service
