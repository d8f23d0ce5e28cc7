"""Prompt files: read, complete in order, write, leave to the broker, and requests by job id without an answer."""

import json
import threading

import numpy as np
import pytest

from specq.client import Client, JobDesk, detach_lines
from specq.client.prompt_files import PromptLine, failure, parse_line, read_lines, result_line, run_lines
from specq.protocol import Accepted, JobError, JobList, ListJobs, SamplingParams, Submit
from specq.testing.fake_broker import FakeBroker, answer
from tests.each import each

# --- lines --------------------------------------------------------------------------------------------------------


def test_lines_are_numbered_and_blank_ones_skipped():
    """Numbers are line numbers of the file. A byte order mark does not belong to the text."""
    lines = list(read_lines([b'\xef\xbb\xbf{"prompt": "a"}\n', b"\n", b'{"prompt": "b", "id": 7}']))
    assert [(line.number, line.id, line.prompt, line.error) for line in lines] == [(1, 1, "a", ""), (3, 7, "b", "")]


@each(
    ("raw", "reason"),
    [
        (b"{", "line 4 is not valid JSON"), (b"\xff\xfe", "line 4 is not UTF-8: it has the byte 0xff"),
        (b"[" * 100_000, "line 4 is not valid JSON"),
        (b'{"prompt": "a", "id": ' + b"[" * 101 + b"]" * 101 + b"}", "line 4 is nested more than 100 levels deep"),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "line 4 is nested more than 100 levels deep"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "top_p": -Infinity}', "-Infinity"), (b'["a"]', "line 4 is not a JSON object, but a list"),
        (b'"a"', "a string"), (b"null", "null"), (b"3", "a number"),
        (b'{"id": 3}', "line 4 has none of prompt, messages, token_ids"), (b'{"prompt": null}', "none of"),
    ],
)  # fmt: skip
def test_malformed_lines(raw, reason):
    """What is wrong is said with the line's number."""
    assert reason in parse_line(4, raw).error


def test_null_is_not_given():
    line = parse_line(1, b'{"prompt": "a", "seed": null}')
    assert (line.arguments, line.error) == ({"prompt": "a"}, "")


def batch_line(body, url="/v1/completions"):
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()


def test_lines_of_batches():
    """With the defaults of the HTTP API, unless an option says otherwise."""
    line = parse_line(2, batch_line({"model": "m", "prompt": "b", "seed": 7}))
    chat = parse_line(3, batch_line({"messages": [{}], "max_completion_tokens": 3}, "/v1/chat/completions"))
    assert line.request({}, as_chat=False) == {
        "id": "a", "prompt": "b", "seed": 7, "temperature": 1.0, "max_tokens": 16
    }  # fmt: skip
    assert line.request({"temperature": 0}, as_chat=False)["temperature"] == 0
    assert chat.request({}, as_chat=False)["max_tokens"] == 3


@each(
    ("raw", "reason"),
    [
        (batch_line({"prompt": "a"}, "/v1/embeddings"), "line 4 has the url '/v1/embeddings', but must have"),
        (batch_line({"prompt": "a"}, ["/v1/completions"]), "line 4 has the url"),
        (batch_line("a"), "line 4 has a body that is not a JSON object, but a string"),
        (batch_line({"prompt": "a", "stream": True}), "line 4 has the unknown key 'stream'"),
        (batch_line({}), "line 4 has none of prompt, messages, token_ids"),
    ],
)
def test_wrong_lines_of_batches(raw, reason):
    assert reason in parse_line(4, raw).error


@each(
    ("key", "hint"),
    [("temprature", "did you mean 'temperature'? "), ("top-p", "did you mean 'top_p'? "), ("reference", "")],
)
def test_unknown_keys_are_refused(key, hint):
    """By name, with the nearest one that there is, if any, and all of them."""
    error = parse_line(4, json.dumps({"prompt": "a", key: 0.5}).encode()).error
    assert error.startswith(
        f"line 4 has the unknown key {key!r}; {hint}known: prompt, messages, token_ids, chat_template_kwargs, "
    )
    assert "temperature" in error.partition("known: ")[2]


@each("bad", [{"prompt": "\ud800"}, {"prompt": "é", "id": 2**80}])
def test_result_lines_hold_anything(bad):
    """Any field of an input line can be echoed."""
    assert json.loads(result_line(failure(PromptLine(1, bad), "no")))["prompt"] == bad["prompt"]


# --- running ------------------------------------------------------------------------------------------------------


class SlowClient:
    """Completes the first line last: when all others that may run have ended."""

    def __init__(self, num_others: int) -> None:
        self.missing, self.all_done = num_others, threading.Event()
        self.running, self.most, self.lock = 0, 0, threading.Lock()

    def generate(self, **arguments):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        if arguments["id"] == 1:
            assert self.all_done.wait(60)
        with self.lock:
            self.running -= 1
            self.missing -= arguments["id"] != 1
            if self.missing == 0:
                self.all_done.set()
        return [failure(PromptLine(arguments["id"]), "")] if arguments["id"] % 2 else _raise()


def _raise():
    raise JobError("even")


def test_order_and_concurrency():
    """A slow first line does not delay the others, results keep the order, and concurrency is limited."""
    client, written = SlowClient(11), []
    lines = [PromptLine(n, {"prompt": "a"}) for n in range(1, 13)]
    num_failed = run_lines(client, lines, {}, written.extend, concurrency=3)
    assert [result.id for result in written] == list(range(1, 13))
    assert client.most <= 3
    assert [result.error for result in written[1::2]] == [f"line {n}: even" for n in range(2, 13, 2)]
    assert num_failed == 12


def job(job_id: int) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(), prompt_ids=np.array([5], np.int32))


def test_a_submission_that_is_never_answered_fails_in_time():
    """Though the broker goes on answering another one."""

    def reply(message):
        if isinstance(message, Submit) and message.job_id == 7:
            return [Accepted(job_id=99)]
        return answer(message)

    with FakeBroker(reply) as broker, JobDesk(broker.address, timeout_s=1.5) as desk:
        submitted = desk.submit([job(7), job(8)])
        assert next(submitted) == (8, None)
        with pytest.raises(JobError, match="is there, but has not answered this for") as caught:
            list(submitted)
    assert caught.value.code == "lost"


def test_lines_that_are_left_to_the_broker_name_the_model_that_their_client_asks_for():
    jobs = []

    def reply(message):
        if isinstance(message, Submit):
            jobs.append(message)
            return [Accepted(job_id=message.job_id)]
        return answer(message)

    with FakeBroker(reply) as broker, Client(broker.address, model="toy") as client, JobDesk(broker.address) as desk:
        (detached,) = detach_lines(client, desk, [PromptLine(1, {"token_ids": [5]})], {})
    assert [(detached.job_ids, "toy")] == [((job.job_id,), job.model) for job in jobs]


@each("data", [b"", b"{", b"{}", b"[1]", b'[{"job_id": 1}]', b"\xff"])
def test_a_list_of_jobs_that_is_none_is_said_to_be_so(data):
    def reply(message):
        return [JobList(skip=message.skip, data=np.frombuffer(data, np.uint8))] if isinstance(message, ListJobs) else []

    with (
        FakeBroker(reply) as broker,
        JobDesk(broker.address) as desk,
        pytest.raises(JobError, match="list of jobs cannot be read"),
    ):
        list(desk.list_jobs())
