"""Verdicts into jobs: to the session's drafters at once, then to transcript and journal.

Verdicts are the broker's most frequent messages. The verdicts of a step arrive as one message of arrays. Their drafters
receive them before the broker commits them, so they draft meanwhile. Rule: before that, a verdict must be sure to fit
its transcript.

For a verdict that arrives alone, only the header is checked as a whole (`decode_scalars`). The broker then reads four
of its arrays. That takes 60% of the time of a whole `decode`. The four arrays are checked as strictly as there. The
drafters read the rest.

Drafters usually receive verdicts at once and unchanged. But a busy verifier verifies hardly any draft. A drafter that
then receives each verdict only takes processor time and bandwidth from it. In that case the broker holds verdicts back
and sends several as one. It sends less often the longer this lasts. If the verifier silences drafters, the broker uses
the lowest rate at once. A synchronous drafter receives each verdict, since its round waits for it.

When the journal holds a verdict's tokens, the clients receive them: see `specq.broker.core.Broker.journaled`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, cast

import numpy as np

from specq.broker.jobs.intake import Delivery, Intake
from specq.broker.state.job import BrokerJob
from specq.broker.state.ledger import added_record
from specq.broker.state.memory import BrokerState, Send
from specq.broker.state.registry import Worker
from specq.broker.state.transcript import Commit
from specq.broker.workers.placement import Placement
from specq.protocol import (
    LEAST_OWN_LANE,
    MAX_NODES,
    ORIGIN_CODES,
    PLAIN,
    TOKEN_IDS,
    Frames,
    ProtocolError,
    Verdict,
    Verdicts,
    array_frame,
    bounds,
    decode,
    decode_scalars,
    encode,
    ends_of_parts,
    num_prompt_bytes,
)

_TOKENS = array_frame(Verdict, "token_ids")
_NODES = array_frame(Verdict, "node_ids")
_MASK = array_frame(Verdict, "mask")
_ORIGINS = array_frame(Verdict, "origins")
_LANES = array_frame(Verdict, "node_lanes")
_are_tokens = cast("Callable[[bytes], object]", TOKEN_IDS.is_plain)
_are_origins = cast("Callable[[bytes], object]", bounds.ORIGIN_BYTES.is_plain)
_PLAIN = bytes([ORIGIN_CODES[PLAIN]])
_PER_SESSION, _PER_TOKEN, _PER_NODE, _PER_SEEN = 36, 5, 6, 4  # bytes in a step's arrays for each
_NO_STATS: dict[str, Any] = {}
NO_ROWS = np.zeros(0, np.uint8)
BUSY = 850  # thousandths: hardly any node reaches this `min_accept_prob`
SILENT = 1000  # above it, no node is likely enough
MOST_HELD = 32  # verdicts that go as one


class Added(NamedTuple):
    """A verdict that added tokens to a job: its tokens except the first `known`."""

    job: BrokerJob
    commit: Commit
    known: int


class VerdictHandler:
    """Handles verdicts, the most frequent messages."""

    def __init__(self, state: BrokerState, placement: Placement, intake: Intake, delivery: Delivery) -> None:
        self.state, self.placement, self.intake, self.delivery = state, placement, intake, delivery

    def relay_all(self, verifier: bytes, frames: Sequence[bytes]) -> tuple[Verdicts, set[int]]:
        """Forward the verdicts of a step to their drafters, except what might not fit or is to be held back.

        Return the step, and the sessions whose verdicts were forwarded. Raises ProtocolError if the message is
        malformed. Then none of its verdicts is taken.
        """
        step = cast("Verdicts", decode(frames))
        step.check()
        prob, places, relayed = step.min_accept_prob, defaultdict[bytes, list[int]](list), set[int]()
        columns = step.session_ids, step.epochs, step.base_lens, step.num_tokens
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        if len({row[0] for row in rows}) < len(rows):  # what comes second must fit what the first leaves
            return step, relayed
        for place, (session_id, epoch, base_len, count) in enumerate(rows):
            job = self.state.jobs.active.get(session_id)
            if (
                job is not None
                and job.drafters.lanes
                and job.session.is_at(verifier, epoch)
                and job.transcript.is_next(base_len, count)
                and not job.has_details
                and _goes_at_once(job, prob)
            ):
                job.drafters.held.asked = prob
                relayed.add(session_id)
                for lane in job.drafters.lanes.values():
                    places[lane.drafter].append(place)
        size = step.session_ids.size
        for drafter, chosen in places.items():
            part = list(frames) if len(chosen) == size else encode(step.take(chosen))
            self.state.outbox.add(Send("front", drafter, part))
        return step, relayed

    def commit_all(self, verifier: bytes, step: Verdicts, relayed: Container[int]) -> None:
        """Commit the verdicts of a step as if each had arrived alone. Drafters have received those of `relayed`."""
        added = list[Added]()
        for place, commit in enumerate(commits_of(step)):
            job = self._job_of(verifier, commit)
            if job is None:
                continue
            lacks_rows = job.request.params.prompt_logprobs >= 0 and not job.transcript.num_tokens
            is_misfit = (job.transcript.logprobs.num_top >= 0 or lacks_rows) and commit.token_ids
            known = self._commit(verifier, job, commit, is_misfit=bool(is_misfit))
            if known >= 0:
                if commit.session_id not in relayed:
                    self.state.outbox.add(*relay(job, commit, partial(_part, step, place)))
                if known < len(commit.token_ids):
                    added.append(Added(job, commit, known))
        self._hear(verifier, step.min_accept_prob)
        self._journal(added)

    def take(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Commit a verdict, and forward it to the session's drafters, the journal and the clients."""
        commit = read_commit(frames)
        job = self._job_of(verifier, commit)
        if job is None:
            return
        transcript = job.transcript
        verdict = cast("Verdict", decode(frames)) if job.has_details else None
        has_rows = verdict is not None and len(verdict.prompt_rows) > 0
        if commit.cached_tokens or has_rows:  # only the broker reads that, and older drafters would refuse it
            frames = encode(replace(cast("Verdict", decode(frames)), cached_tokens=0, prompt_rows=NO_ROWS))
        is_misfit = verdict is not None and not (
            fits_logprobs(verdict, transcript.logprobs.num_top) and fits_prompt(verdict, job)
        )
        known = self._commit(verifier, job, commit, is_misfit=is_misfit)
        if known < 0:
            return
        self.state.outbox.add(*relay(job, commit, lambda: list(frames)))
        self._hear(verifier, commit.min_accept_prob)
        is_new = known < len(commit.token_ids)
        if verdict is not None and is_new:
            transcript.logprobs.extend(verdict, known)
            transcript.prompt_rows = transcript.prompt_rows or verdict.prompt_rows.tobytes()
            if job.explanation and not known:
                job.explanation.add(verdict, commit.base_len - transcript.prompt_len)
        if transcript.finish:
            self.intake.finish(job)
        elif is_new:
            self._journal([Added(job, commit, known)])

    def _hear(self, verifier: bytes, min_accept_prob: int) -> None:
        """Note whether a verifier asks drafters to be silent."""
        worker, wants_silence = self.state.workers.get(verifier), min_accept_prob > SILENT
        if worker is not None and worker.wants_silence != wants_silence:
            self.placement.drafter_assignment.hear(worker, wants_silence=wants_silence)

    def _job_of(self, verifier: bytes, commit: Commit) -> BrokerJob | None:
        """Return the job of a verdict. If the job is not at this verifier any more, count that and return None."""
        job = self.state.jobs.active.get(commit.session_id)
        if job is not None and job.session.is_at(verifier, commit.epoch):
            return job
        self.state.counts["late_verdicts"] += 1
        return None

    def _commit(self, verifier: bytes, job: BrokerJob, commit: Commit, *, is_misfit: bool) -> int:
        """Append the verdict's new tokens to a job. Return how many were known, or -1 if it does not fit."""
        known = -1 if is_misfit else job.transcript.commit(commit)
        if known < 0:
            self.state.counts["misfit_verdicts"] += 1
        elif num_new := len(commit.token_ids) - known:
            if commit.base_len == job.transcript.prompt_len and not known:
                job.stats.cached_tokens = min(commit.cached_tokens, job.transcript.prompt_len)
            job.stats.add(commit)
            self.state.rounds[job.request.model].add(job.transcript, commit, num_new)
            if (worker := self.state.workers.get(verifier)) is not None:
                worker.num_tokens += num_new
                if job.drafters and commit.lanes:
                    self._credit(job, commit.lanes, worker)
            if job.trace is not None and job.trace.in_all_processes:
                counts = (commit.base_len, len(commit.token_ids), commit.num_nodes, commit.num_accepted)
                job.trace.add_often(self.state.clock.now, "verdict", *counts, *commit.us)
        return known

    def _credit(self, job: BrokerJob, lanes: bytes, verifier: Worker) -> None:
        """Count the accepted nodes, by their lanes, for the draft workers that drafted them."""
        for number in lanes:
            lane = job.drafters.lanes.get(number)
            if lane is not None and (drafter := self.state.workers.get(lane.drafter)) is not None:
                drafter.accepted_for[verifier.name] += 1

    def _journal(self, added: Sequence[Added]) -> None:
        """Journal the tokens that verdicts added to jobs. Without a journal, the clients may receive them now."""
        for job, commit, known in added:
            if job.is_cleared:
                self.placement.clear(job)
            if self.state.ledger.has_journal:
                self.state.record(added_record(job, commit, known), job)
            else:
                job.durable.note(job.transcript.num_tokens, ended=False)
                self.delivery.note(job)


def read_commit(frames: Sequence[bytes]) -> Commit:
    """Decode a verdict's frames.

    Raises ProtocolError for malformed frames.
    """
    header = decode_scalars(frames, Verdict)
    tokens = frames[_TOKENS] if len(frames) > _TOKENS else b""
    nodes = frames[_NODES] if len(frames) > _NODES else b""
    mask = frames[_MASK] if len(frames) > _MASK else b""
    only = next((lane for lane in header.get("seen", ())[:1] if 0 <= lane < LEAST_OWN_LANE), LEAST_OWN_LANE)
    lanes = (frames[_LANES] if len(frames) > _LANES else b"") or bytes([only]) * len(mask)
    if len(tokens) % 4 or len(nodes) != 4 * len(mask) or len(lanes) != len(mask) or len(mask) > MAX_NODES:
        raise ProtocolError(f"a verdict's arrays do not fit together, or have more than {MAX_NODES} nodes")
    if not _are_tokens(tokens):
        raise ProtocolError(f"verdict.token_ids must be {TOKEN_IDS.allowed}")
    token_ids = np.frombuffer(tokens, "<i4").tolist()
    origins = (frames[_ORIGINS] if len(frames) > _ORIGINS else b"") or _PLAIN * len(token_ids)
    if len(origins) != len(token_ids) or not _are_origins(origins):
        raise ProtocolError(f"verdict.origins must hold {bounds.ORIGIN_BYTES.allowed}, one a token, or nothing")
    return Commit(
        session_id=int.from_bytes(frames[0], "little"),
        epoch=header["epoch"],
        base_len=header["base_len"],
        finish=header.get("finish", ""),
        min_accept_prob=header.get("min_accept_prob", 0),
        us=header.get("us", ()),
        stats=header.get("stats", {}),
        cached_tokens=header.get("cached_tokens", 0),
        token_ids=token_ids,
        raw=tokens,
        origins=origins,
        num_nodes=len(mask),
        lanes=bytes(compress(lanes, mask)),
        num_bytes=sum(map(len, frames)),
    )


def commits_of(step: Verdicts) -> Iterator[Commit]:
    """Yield the verdicts of a step. Its arrays must fit together."""
    tokens, raw, origins = step.token_ids.tolist(), step.token_ids.tobytes(), step.origins.tobytes()
    ends, node_ends = ends_of_parts(step.num_tokens), ends_of_parts(step.num_nodes)
    accepted, lanes = ends_of_parts(step.mask)[node_ends], step.node_lanes[step.mask != 0].tobytes()
    num_bytes = _PER_SESSION + _PER_TOKEN * step.num_tokens + _PER_NODE * step.num_nodes + _PER_SEEN * step.num_seen
    of_verdicts = step.session_ids, step.epochs, step.base_lens, step.waited_us, num_bytes, step.num_nodes
    columns = *of_verdicts, accepted[:-1], accepted[1:], ends[:-1], ends[1:]
    prob, us = step.min_accept_prob, step.step_us
    for session_id, epoch, base_len, waited, size, nodes, first, last, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        own, own_raw, own_origins = tokens[start:end], raw[4 * start : 4 * end], origins[start:end]
        yield Commit(
            session_id, epoch, base_len, "", prob, (us, waited), _NO_STATS, 0, own, own_raw, own_origins,
            nodes, lanes[first:last], size,
        )  # fmt: skip


def fits_logprobs(verdict: Verdict, num_top: int) -> bool:
    """Return whether a verdict has the log-probabilities that its job asked for.

    These are one for each token, and those of `num_top` alternatives. With -1 the job asked for none, and extra values
    do no harm. The journal stores one row per token.
    """
    count = len(verdict.token_ids)
    top = {len(verdict.top_ids), len(verdict.top_logprobs)}
    return num_top < 0 or (len(verdict.logprobs) == count and top == {num_top * count})


def fits_prompt(verdict: Verdict, job: BrokerJob) -> bool:
    """Return whether a verdict has the prompt's log-probabilities, if it is the first and the job asked for them."""
    wanted = num_prompt_bytes(job.request.prompt_len, job.request.params)
    has_none = not len(verdict.token_ids) or job.transcript.num_tokens > 0
    return len(verdict.prompt_rows) == wanted or (has_none and not len(verdict.prompt_rows))


def relay(job: BrokerJob, commit: Commit, frames: Callable[[], Frames]) -> list[Send]:
    """Return the messages to drafters for a verdict that was committed. Empty if it is held back."""
    lanes = job.drafters.lanes.values()
    if not lanes:
        return []
    job.drafters.held.asked = commit.min_accept_prob
    sent = frames() if _goes_at_once(job, commit.min_accept_prob) else _held(job, commit)
    return [Send("front", lane.drafter, sent) for lane in lanes] if sent else []


def _part(step: Verdicts, place: int) -> Frames:
    return encode(step.take([place]))


def _goes_at_once(job: BrokerJob, min_accept_prob: int) -> bool:
    return job.drafters.held.since < 0 and not _is_busy(job, min_accept_prob)


def _is_busy(job: BrokerJob, min_accept_prob: int) -> bool:
    return min_accept_prob > BUSY and not job.request.speculation.waits


def _held(job: BrokerJob, commit: Commit) -> Frames | None:
    """Hold a verdict back. When it is time, return all held verdicts as one, else None."""
    held, is_busy = job.drafters.held, _is_busy(job, commit.min_accept_prob)
    if held.since < 0:
        held.since = commit.base_len
    held.count += 1
    if is_busy and held.count < held.most:
        return None
    growth = 2 if commit.min_accept_prob <= SILENT else MOST_HELD
    held.most = min(growth * held.most, MOST_HELD) if is_busy else 1
    merged = Verdict(
        session_id=job.job_id,
        epoch=job.session.epoch,
        base_len=held.since,
        min_accept_prob=commit.min_accept_prob,
        token_ids=job.transcript.since(held.since),
    )
    held.since, held.count = -1, 0
    return encode(merged)
