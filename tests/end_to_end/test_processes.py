"""Broker, verifier and drafters as real processes over TCP, with the bundled pair."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq
from transformers import AutoModelForCausalLM

from specq import Client
from specq.client.result import Result
from specq.models import resolve_model
from specq.processes.up import Group
from specq.protocol.messages import PROTOCOL_VERSION
from specq.transport.sockets import connect_dealer
from tests.deploying import connected, group_of, ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "Write a Python function that returns the sum of a list.",
    "What is the capital of France?",
    "A train goes 60 miles in an hour. How far does it go in 4 hours?",
)
SPECQ = (sys.executable, "-m", "specq")
MOST_ROUNDS = 20  # of all questions


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model of the bundled shape and tokenizer, with random weights."""
    source, directory = Path(resolve_model("tiny", "draft")), tmp_path_factory.mktemp("random")
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    return str(directory)


def start(drafters: int, draft_model: str = "tiny") -> Group:
    """Start a verifier that uses every draft, and drafters."""
    return group_of(up={"drafters": drafters}, target={"drafts": "always"}, draft={"model": draft_model})


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A broker, a verifier and two drafters."""
    with ready(start(2)) as running:
        yield running


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with Client(group.address) as one:
        yield one


def answers(client: Client, in_flight: int = 4, **params: object) -> list[Result]:
    """Return the results for all questions, so many at a time; the seed is the question's number."""
    found: list[Result] = []
    for first in range(0, len(QUESTIONS), in_flight):
        batch = list(enumerate(QUESTIONS))[first : first + in_flight]
        jobs = [client.submit(messages=[{"role": "user", "content": q}], seed=i, **params) for i, q in batch]
        found += [job.result(120) for job in jobs]
    return found


def answers_until(is_enough: Callable[[list[Result]], bool], client: Client, **params: object) -> list[Result]:
    """Return the results for all questions, again and again until they are enough: draft workers of a busy machine are
    often late."""
    found: list[Result] = []
    for _ in range(MOST_ROUNDS):
        found += answers(client, **params)
        if is_enough(found):
            break
    return found


def have_mattered(results: list[Result]) -> bool:
    """Return whether drafts were accepted, rejected, and there ahead of the verdict."""
    accepted, rejected, hits = counts(results)
    return min(accepted, hits) > 10 and rejected > 0


def were_drafted(results: list[Result]) -> bool:
    return sum(result.internal["drafted"] for result in results) > 0


def were_accepted(results: list[Result]) -> bool:
    return sum(result.stats["accepted_tokens"] for result in results) > 0


def counts(results: list[Result]) -> tuple[int, int, int]:
    """Return (accepted, rejected) drafts, and rounds whose outcome had been drafted before."""
    accepted, drafted = (sum(result.stats[name] for result in results) for name in ("accepted_tokens", "draft_tokens"))
    hits = sum(result.internal["hits"] for result in results)
    return accepted, drafted - accepted, hits


def test_greedy_text_is_transformers_own(client: Client) -> None:
    """Token for token what `generate` says, with drafts accepted and rejected."""
    results = answers_until(have_mattered, client, max_tokens=48)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny", "target"), dtype=torch.float32).eval()
    expected = []
    for question in QUESTIONS:
        prompt = client.served.codec.encode_chat([{"role": "user", "content": question}])
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
        expected.append(out[0, len(prompt) :].tolist())
    assert [result.token_ids for result in results] == expected * (len(results) // len(QUESTIONS))
    assert have_mattered(results)


def test_sampled_text_does_not_depend_on_the_drafter(client: Client, random_draft: str) -> None:
    """At T = 0.8 with a seed: the same with two drafters, none, and one of random weights, one or four in flight."""
    params = {"max_tokens": 48, "temperature": 0.8, "top_p": 0.95}
    results = answers_until(have_mattered, client, in_flight=1, **params)
    texts = [result.token_ids for result in results[: len(QUESTIONS)]]
    assert [result.token_ids for result in results] == texts * (len(results) // len(QUESTIONS))
    assert have_mattered(results)
    assert texts == [result.token_ids for result in answers(client, **params)]
    other = start(1, random_draft)
    with connected(other) as another:
        drafted = answers_until(were_drafted, another, **params)
        other.processes["draft-1"].terminate()
        assert other.processes["draft-1"].wait(60) == 0
        plain = answers(another, in_flight=1, mode="plain", **params)
    assert [result.token_ids for result in drafted] == texts * (len(drafted) // len(QUESTIONS))
    assert texts == [result.token_ids for result in plain]
    assert were_drafted(drafted)
    assert not were_drafted(plain)


def test_stop_strings_end_the_text(client: Client) -> None:
    """The text stops before the stop string, wherever the tokens' borders are."""
    whole = client.generate(messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=48)
    stop = whole.text[10:13]
    cut = client.generate(messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=48, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_submit_writes_a_line_for_each_line(group: Group, tmp_path: Path) -> None:
    """Good lines have results, bad lines have errors, the order is kept, and the exit status shows failures."""
    lines = [
        '{"id": "a", "prompt": "2 + 2 =", "max_tokens": 8}',
        '{"prompt": "half a line',
        '{"id": "c", "messages": [{"role": "user", "content": "Hi"}], "temperature": -1}',
        '{"id": "d", "token_ids": [5, 99999]}',
        '{"id": "e", "prompt": ""}',
        '{"id": "f", "prompt": "x", "strategy": "wishful"}',
        '{"id": "g", "prompt": "x", "top_p": NaN}',
        json.dumps({"id": "h", "prompt": "long " * 3000}),
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    command = [*SPECQ, "submit", str(source), "--out", str(out), "--broker", group.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode != 0
    assert [result["id"] for result in results] == ["a", 2, "c", "d", "e", "f", 7, "h"]
    good = results[0]
    assert (good["error"], good["finish_reason"] in ("stop", "length")) == (None, True)
    assert set(good) == {"id", "prompt", "text", "token_ids", "finish_reason", "usage", "stats", "error"}
    wanted = ("line 2", "temperature", "vocabulary", "empty", "wishful", "line 7", "2048")
    for result, words in zip(results[1:], wanted, strict=True):
        assert result["finish_reason"] == "error"
        assert words in result["error"]


def test_garbage_is_dropped(group: Group, client: Client) -> None:
    """Random frames at the broker's socket are counted; jobs go on."""
    before = client.status()["counts"].get("dropped_front", 0)
    draft = [bytes(8), b'{"v":%d,"type":"draft"}' % PROTOCOL_VERSION, b"x" * 1000]
    with zmq.Context() as context, connect_dealer(context, group.address, queue=True) as socket:
        for frames in ([b"x"], [b"", b""], [b"12345678", b"{}"], draft):
            socket.send_multipart(frames)
        result = client.generate("1 + 1 =", max_tokens=8)
    assert result.error is None
    assert client.status()["counts"]["dropped_front"] - before >= 3


def test_a_draft_model_of_another_vocabulary_is_refused(group: Group, tmp_path: Path) -> None:
    """At registration, naming both models, with a non-zero exit status."""
    source = Path(resolve_model("tiny", "draft"))
    for path in source.iterdir():
        shutil.copy(path, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ["--role", "draft", "--model", str(tmp_path), "--broker", group.address, "--name", "alien", "--nice", "0"]
    done = subprocess.run([*SPECQ, "worker", *command], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 0
    assert "refuses this worker" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_processes_end_well() -> None:
    """SIGTERM ends each role with status 0."""
    with ready(start(1)) as running:
        running.stop()
        ends = {name: process.returncode for name, process in running.processes.items()}
        assert ends == dict.fromkeys(["broker", "target-1", "draft-1"], 0)


def test_log_probabilities_come_with_the_tokens(client: Client) -> None:
    """One entry a token, accepted ones included; greedy tokens are the likeliest."""
    results = answers_until(were_accepted, client, max_tokens=24, logprobs=2)
    result = max(results, key=lambda result: result.stats["accepted_tokens"])
    assert result.logprobs is not None
    assert result.stats["accepted_tokens"] > 0
    assert [entry["token_id"] for entry in result.logprobs] == result.token_ids
    for entry in result.logprobs:
        assert entry["top"][0] == [entry["token_id"], pytest.approx(entry["logprob"])]
        assert entry["top"][1][1] <= entry["logprob"] <= 0


def test_what_shapes_the_text_is_honoured(client: Client) -> None:
    """A biased token never comes, a banned one neither, and a penalty changes the text."""
    question = [{"role": "user", "content": QUESTIONS[0]}]
    plain = client.generate(messages=question, max_tokens=24)
    first = plain.token_ids[0]
    biased = client.generate(messages=question, max_tokens=24, logit_bias={first: -100})
    banned = client.generate(messages=question, max_tokens=24, bad_token_ids=[[first]])
    assert first not in biased.token_ids
    assert banned.token_ids == biased.token_ids
    penalised = client.generate(messages=question, max_tokens=48, frequency_penalty=2.0)
    assert penalised.token_ids != client.generate(messages=question, max_tokens=48).token_ids
