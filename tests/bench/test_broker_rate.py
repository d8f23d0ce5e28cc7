"""`specq bench broker-rate` at its smallest, and that its clients would notice a token that is lost, doubled or
another."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from bench.broker_load import FIRST_JOB, TOKEN, Received, Steps
from bench.deployments import cpu_seconds
from specq.cli import main
from specq.protocol.errors import EngineError
from specq.protocol.messages import Failed, JobTokens, Open, Tokens, Verdicts
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode


def test_the_verdicts_of_steps_go_on():
    """Valid messages on all sessions, each from where the one before ended."""
    opened = [
        Open(
            session_id=i, epoch=5, prompt_len=1, tokens_left=9, params=SamplingParams(), token_ids=np.ones(i, np.int32)
        )
        for i in (1, 2)
    ]
    steps = Steps(opened, 3)
    first, second = (decode(steps.take()) for _ in range(2))
    assert isinstance(first, Verdicts)
    assert isinstance(second, Verdicts)
    assert [one.base_len for one in first.each()] == [1, 2]
    assert [one.base_len for one in second.each()] == [4, 5]
    assert {len(one.token_ids) for one in second.each()} == {3}


def together(base_lens, token_ids, **fields):
    sizes = np.full(len(base_lens), len(token_ids) // len(base_lens))
    ids = np.arange(len(base_lens)) + FIRST_JOB
    origins = np.full(len(token_ids), 2)
    arrays = {"job_ids": ids, "base_lens": base_lens, "num_tokens": sizes, "token_ids": token_ids, "origins": origins}
    return encode(JobTokens(**{name: np.array(value) for name, value in (arrays | fields).items()}))


def test_clients_count_tokens_in_their_place():
    """Alone or together."""
    received = Received(2)
    received.take(together([0, 0], [TOKEN] * 4))
    alone = Tokens(job_id=FIRST_JOB + 1, base_len=2, token_ids=np.array([TOKEN]), origins=np.array([2]))
    received.take(encode(alone))
    assert (received.num_tokens, received.num_messages, received.lengths.tolist()) == (5, 2, [2, 3])


@pytest.mark.parametrize(
    "frames",
    [
        together([1, 0], [TOKEN] * 4), together([0, 0], [TOKEN, TOKEN + 1]), together([0, 0], [TOKEN] * 3,
        num_tokens=[1, 1]),
        encode(Failed(job_id=FIRST_JOB, code="engine", reason="it broke")),
    ],
)  # fmt: skip
def test_what_is_not_next_is_noticed(frames):
    """A gap, another token, sizes that do not add up, a failure."""
    with pytest.raises(EngineError, match="a client received"):
        Received(2).take(frames)


def test_processor_time_of_a_process():
    """Of one that is there; None of one that is not."""
    assert cpu_seconds(os.getpid()) > 0
    assert cpu_seconds(2**22 + 1) is None


def test_several_brokers_need_a_database():
    """A file is a journal for one."""
    outcome = CliRunner().invoke(main, ["bench", "broker-rate", "--brokers", "2", "--journal", "full"])
    assert outcome.exit_code == 2
    assert "several brokers need --database" in outcome.output


@pytest.mark.slow
def test_the_suite(tmp_path):
    """With a journal and without, several clients, a drafter; all tokens arrive."""
    out = tmp_path / "rate.json"
    asked = [
        "--sessions",
        "5",
        "--clients",
        "2",
        "--drafters",
        "1",
        "--repeats",
        "1",
        "--seconds",
        "0.1",
        "--out",
        str(out),
    ]
    outcome = CliRunner().invoke(main, ["bench", "broker-rate", "--journal", "none", "--journal", "full", *asked])
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(out.read_text())["figures"]
    assert {name.rpartition(": ")[2] for name in figures} == {"tokens", "messages", "busy", "us"}
    assert all(figure["median"] > 0 for name, figure in figures.items() if name.endswith("tokens"))
