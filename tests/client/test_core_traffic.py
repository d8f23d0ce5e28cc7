"""With one broker, the client sends the same messages at the same times as it did before it knew several.

The digests were recorded with the version before. A random broker loses, delays and refuses messages.
"""

import hashlib
import random

import numpy as np

from specq.client.core import ClientCore
from specq.protocol import Accepted, Failed, GetStatus, JobInfo, SamplingParams, Status, Submit
from specq.testing.fake_broker import tokens
from tests.client.cores import TEXT, job_of
from tests.each import each

STEP_S = 0.05
NUM_STEPS = 1200


def answers(message, chance: random.Random) -> list:
    """Return what a broker may answer."""
    if isinstance(message, GetStatus):
        return [Status(report={})]
    job_id = getattr(message, "job_id", 0)
    info = JobInfo(job_id=job_id, params=SamplingParams(max_tokens=20), prompt_ids=np.array([1], np.int32))
    start = chance.randrange(8)
    end = min(len(TEXT), start + chance.randrange(5))
    finish = chance.choice(["", "", "length", "error"])
    choices = [
        [Accepted(job_id=job_id)],
        [info, tokens(job_id, start, TEXT[start:end], finish)],
        [tokens(job_id, start, TEXT[start:end], finish if start == 0 else "")],
        [Failed(job_id=job_id, code="no_verifier", reason="none")],
    ]
    return chance.choice(choices)


def act(core: ClientCore, chance: random.Random, now: float) -> None:
    """Make one request, of any kind."""
    job_id = chance.randrange(1, 9)
    actions = [
        lambda: core.submit(job_of(job_id), now, keep_running=chance.random() < 0.3),
        lambda: core.submit_detached(job_of(job_id), now),
        lambda: core.find(job_id, now, until_end=chance.random() < 0.5),
        lambda: core.cancel(job_id, now) if job_id in core._requests else None,  # others were not stopped then
        lambda: core.abandon(job_id, now),
        lambda: core.get_status(now),
        lambda: core.get_trace(job_id, now),
        lambda: core.list_jobs(10, 0, now),
        lambda: core.fetch_tokenizer("m", now, chance.choice([None, 0.0, 20.0])),
    ]
    chance.choice(actions)()


def traffic(seed: int) -> tuple[int, str]:
    """Return the number of messages and events, and a digest of all with their times."""
    chance, core, on_the_way, sent = random.Random(seed), ClientCore("tcp://somewhere:1", 5.0), [], []
    for step in range(NUM_STEPS):
        now = step * STEP_S
        if chance.random() < 0.08:
            act(core, chance, now)
        told = core.tick(now)
        for message in core.take_outbox():
            sent.append((step, message.TYPE, getattr(message, "job_id", ""), getattr(message, "have", "")))
            if not 300 < step < 500 and chance.random() < 0.6:  # a broker that is gone for a while
                on_the_way += answers(message, chance)
        while on_the_way and chance.random() < 0.4:
            told += core.receive(on_the_way.pop(0), now)
        sent += [(step, type(event).__name__, event.key, str(getattr(event, "error", ""))) for event in told]
    assert any(kind == Submit.TYPE for _, kind, *_ in sent)
    return len(sent), hashlib.sha256(repr(sent).encode()).hexdigest()[:16]


RECORDED = [
    (0, (303, "4d3332b6148ac9b5")),
    (1, (279, "2f21098561980f4f")),
    (2, (313, "49546524c734bb24")),
    (3, (281, "212e801b51dcb0a2")),
    (4, (320, "3127f1733470c225")),
    (5, (281, "6bf0cf26def36afc")),
    (6, (307, "ee3c8ecd8a3a8a95")),
    (7, (261, "d76e619f8773c30d")),
]


@each(("seed", "expected"), RECORDED)
def test_one_broker_gets_the_same_traffic(seed, expected):
    assert traffic(seed) == expected
