"""Files of prompts to files of results: formats, order, bad lines, exit statuses."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.client.prompt_files import Line, failure, parse_line, read_lines, result_line, run_lines
from specq.protocol.errors import JobError
from specq.protocol.messages import Cancel, Failed, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, FakeBroker, answer, completion
from specq.testing.fake_broker import STATS as STATS_SENT
from tests.submitting import GOOD, run

pytestmark = pytest.mark.usefixtures("own_cache")
FIELDS = ["id", "prompt", "text", "token_ids", "finish_reason", "usage", "stats", "error"]
STATS = [
    "rounds",
    "draft_tokens",
    "accepted_tokens",
    "acceptance_rate",
    "mean_accepted_length",
    "tokens_per_second",
    "time_to_first_token_ms",
    "seed",
]


# --- lines --------------------------------------------------------------------------------------------------------


def test_lines_are_numbered_and_blank_ones_skipped():
    """Numbers are those of the file; a byte order mark is no part of the text."""
    lines = list(read_lines([b'\xef\xbb\xbf{"prompt": "a"}\n', b"\n", b'{"prompt": "b", "id": 7}']))
    assert [(line.number, line.id, line.prompt, line.error) for line in lines] == [(1, 1, "a", ""), (3, 7, "b", "")]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "line 4 is not valid JSON"),
        (b"\xff\xfe", "line 4 is not valid JSON"),
        (b"[" * 100_000, "line 4 is not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "top_p": -Infinity}', "-Infinity"),
        (b'["a"]', "line 4 is not a JSON object, but a list"),
        (b'"a"', "a string"),
        (b"null", "null"),
        (b"3", "a number"),
        (b'{"id": 3}', "line 4 has none of prompt, messages, token_ids"),
        (b'{"prompt": null}', "none of"),
    ],
)
def test_malformed_lines(raw, reason):
    """What is wrong is said with the line's number."""
    assert reason in parse_line(4, raw).error


def test_null_is_not_given():
    line = parse_line(1, b'{"prompt": "a", "seed": null}')
    assert (line.arguments, line.error) == ({"prompt": "a"}, "")


@pytest.mark.parametrize(
    ("key", "hint"),
    [("temprature", "did you mean 'temperature'? "), ("top-p", "did you mean 'top_p'? "), ("reference", "")],
)
def test_unknown_keys_are_refused(key, hint):
    """By name, with the nearest one that there is, if any, and all of them."""
    error = parse_line(4, json.dumps({"prompt": "a", key: 0.5}).encode()).error
    assert error.startswith(f"line 4 has the unknown key {key!r}; {hint}known are prompt, messages, token_ids, id, ")
    assert "temperature" in error.partition("known are")[2]


@pytest.mark.parametrize("bad", [{"prompt": "\ud800"}, {"prompt": "é", "id": 2**80}])
def test_result_lines_hold_anything(bad):
    """Whatever a line said can be echoed."""
    assert json.loads(result_line(failure(Line(1, bad), "no")))["prompt"] == bad["prompt"]


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
            assert self.all_done.wait(10)
        with self.lock:
            self.running -= 1
            self.missing -= arguments["id"] != 1
            if self.missing == 0:
                self.all_done.set()
        return [failure(Line(arguments["id"]), "")] if arguments["id"] % 2 else _raise()


def _raise():
    raise JobError("even")


def test_order_and_concurrency():
    """A slow first line holds up nobody, results keep the order, and no more than asked run at a time."""
    client, written = SlowClient(11), []
    lines = [Line(n, {"prompt": "a"}) for n in range(1, 13)]
    num_failed = run_lines(client, lines, {}, written.extend, concurrency=3)
    assert [result.id for result in written] == list(range(1, 13))
    assert client.most <= 3
    assert [result.error for result in written[1::2]] == [f"line {n}: even" for n in range(2, 13, 2)]
    assert num_failed == 12


# --- the command --------------------------------------------------------------------------------------------------


def test_good_lines(broker, tmp_path):
    """Every kind of line; results have exactly the promised fields, in the order of the lines; exit status 0."""
    chat = [{"role": "user", "content": "Hi"}]
    lines = [
        {"prompt": "two eggs", "id": "first"},
        {"messages": chat, "max_tokens": 4},
        {"token_ids": [5, 6], "max_tokens": 2},
    ]
    outcome, results = run(broker, tmp_path, "\n".join(map(json.dumps, lines)))
    assert outcome.exit_code == 0, outcome.output
    assert [result["id"] for result in results] == ["first", 2, 3]
    assert [list(result) for result in results] == [FIELDS] * 3
    assert [list(result["stats"]) for result in results] == [STATS] * 3
    assert [result["text"] for result in results] == [
        ANSWER,
        CODEC.decode(ANSWER_IDS[:4]),
        CODEC.decode(ANSWER_IDS[:2]),
    ]
    assert [result["finish_reason"] for result in results] == ["stop", "length", "length"]
    assert results[0]["usage"] == {
        "prompt_tokens": len(CODEC.encode("two eggs")),
        "completion_tokens": len(ANSWER_IDS),
    }
    assert results[1]["prompt"] == CODEC.render_chat(chat)
    assert {result["error"] for result in results} == {None}


def test_bad_lines_harm_no_others(broker, tmp_path):
    """Each bad line becomes an error line with its number; the others are complete; exit status 1."""
    bad = ["nonsense", '{"prompt": ""}', '{"prompt": "a", "temperature": -1}', '{"prompt": "a", "strategy": "x"}']
    bad += ['{"token_ids": [99999]}', '{"prompt": "a", "top_p": NaN}', '{"prompt": "a", "max_tokens": "b"}']
    bad += ['{"prompt": ["a", "b"]}', '{"token_ids": [[5], [6]]}']
    bad += ['{"prompt": "a", "temprature": 1}', json.dumps({"prompt": "a", "bad_token_ids": [[5, 6, 7]] * 9000})]
    bad += [json.dumps({"token_ids": [5] * 100}), '{"prompt": "\\ud800"}', '{"prompt": "a", "token_ids": [3]}']
    outcome, results = run(broker, tmp_path, "".join(f"{line}\n{GOOD}" for line in bad))
    assert outcome.exit_code == 1
    assert [result["text"] for result in results[1::2]] == [ANSWER] * len(bad)
    assert [result["error"] for result in results[1::2]] == [None] * len(bad)
    for number, result in enumerate(results[::2]):
        assert list(result) == FIELDS
        assert (result["finish_reason"], result["text"], result["token_ids"]) == ("error", "", [])
        assert f"line {2 * number + 1}" in result["error"]
    assert f"{len(bad)} of {2 * len(bad)} lines failed: line 1 is not valid JSON" in outcome.stderr


def test_options_are_defaults(broker, tmp_path):
    """Options hold for lines that do not give their own."""
    text = '{"prompt": "a"}\n{"prompt": "a", "temperature": 0.5, "stop": "X", "max_tokens": 9}\n'
    options = "--temperature 0.8 --seed 5 --top-k 3 --top-p 0.9 --min-p 0.1 --stop A --stop B --ignore-eos"
    outcome, _ = run(broker, tmp_path, text, *options.split(), "--max-tokens", "7", "--concurrency", "1")
    assert outcome.exit_code == 0
    first, second = (message.params for message in broker.wait_for(Submit, 2))
    assert (first.temperature, first.seed, first.top_k, first.top_p, first.min_p) == (0.8, 5, 3, 0.9, 0.1)
    assert (first.stop, first.ignore_eos, first.max_tokens) == (("A", "B"), True, 7)
    assert (second.temperature, second.stop, second.max_tokens, second.seed) == (0.5, ("X",), 9, 5)


def test_chat_option(broker, tmp_path):
    """With --chat a prompt goes through the template; lines with messages or ids are as ever."""
    _, results = run(broker, tmp_path, GOOD + '{"token_ids": [5]}\n{"prompt": ""}\n', "--chat")
    assert results[0]["prompt"] == CODEC.render_chat([{"role": "user", "content": "two eggs"}])
    assert results[1]["prompt"] == CODEC.decode([5], skip_special=False)
    assert "empty" in results[2]["error"]


def test_standard_streams(broker):
    """`-` is standard input, and results go to standard output; nothing else is said."""
    text = '{"prompt": "a"}\n' * 2
    outcome = CliRunner().invoke(main, ["submit", "-", "--out", "-", "--broker", broker.address], input=text)
    assert outcome.exit_code == 0
    assert [json.loads(line)["text"] for line in outcome.stdout.splitlines()] == [ANSWER] * 2
    assert outcome.stderr == ""


def test_stream_shows_the_text(broker, tmp_path):
    """The text is shown as it grows, without the stop string; the results are written all the same."""
    outcome, results = run(broker, tmp_path, GOOD + GOOD, "--stream", "--stop", "END")
    assert outcome.stdout == 2 * "A wörld of eggs.\n\n"
    assert [result["text"] for result in results] == ["A wörld of eggs.\n"] * 2


def test_a_job_that_fails(tmp_path):
    """The broker's reason for a failed job is in its line."""

    def reply(message):
        if isinstance(message, Submit) and message.params.max_tokens == 3:
            return [Failed(job_id=message.job_id, code="engine", reason="it broke")]
        return completion(message) if isinstance(message, Submit) else answer(message)

    with FakeBroker(reply) as broker:
        outcome, results = run(broker, tmp_path, '{"prompt": "a", "max_tokens": 3}\n' + GOOD)
    assert outcome.exit_code == 1
    assert [result["error"] for result in results] == ["line 1: it broke", None]


def test_an_empty_file(broker, tmp_path):
    """No lines, no results, no failure."""
    outcome, results = run(broker, tmp_path, "")
    assert (outcome.exit_code, results) == (0, [])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--strategy", "wishful"], "deterministic"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "many"], "many"),
        (["--concurrency", "0"], "concurrency"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--broker", "nonsense"], "nonsense"),
        (["--out", "/no/such/folder/x"], "/no/such/folder"),
        (["--wat"], "--wat"),
    ],
)
def test_bad_options(broker, tmp_path, options, reason):
    """A bad option is one clear line and a failure, before any prompt is sent."""
    outcome, _ = run(broker, tmp_path, GOOD, *options)
    assert outcome.exit_code != 0
    assert reason in outcome.stderr.splitlines()[-1]
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)
    assert broker.num_heard(Submit) == 0


def test_prompts_are_not_overwritten(broker, tmp_path):
    """Results do not go where the prompts are."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(GOOD)
    outcome = CliRunner().invoke(main, ["submit", str(path), "--out", str(path), "--broker", broker.address])
    assert (outcome.exit_code, path.read_text()) == (2, GOOD)


def test_no_such_prompts():
    """A prompts file that is not there is named."""
    outcome = CliRunner().invoke(main, ["submit", "/no/such/prompts"])
    assert outcome.exit_code == 2
    assert "/no/such/prompts" in outcome.stderr


def test_interrupted(tmp_path, spawn):
    """Ctrl-C ends the command at once, with what is done written, and stops the jobs that run."""

    def reply(message):
        slow = isinstance(message, Submit) and message.params.max_tokens == 9
        return [] if slow or isinstance(message, Cancel) else answer(message)

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(GOOD + '{"prompt": "a", "max_tokens": 9}\n' * 3)
    with FakeBroker(reply) as broker:
        process = spawn("submit", str(prompts), "--out", str(out), "--broker", broker.address)
        broker.wait_for(Submit, 4)
        while not out.exists() or not out.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
        assert len({message.job_id for message in broker.wait_for(Cancel, 3)}) == 3
    assert json.loads(out.read_text())["text"] == ANSWER


def test_progress_bar(broker, tmp_path):
    """On a terminal a bar counts the prompts, however many completions they have."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD * 3)
    master, slave = pty.openpty()
    arguments = ["submit", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--broker", broker.address, "--n", "2"]
    done = subprocess.run([sys.executable, "-m", "specq", *arguments], stderr=slave, check=False, timeout=20)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert done.returncode == 0
    assert "prompts" in shown
    assert "3/3" in shown
    assert "6/3" not in shown


@pytest.mark.parametrize("gone", [True, False])
def test_nobody_there(tmp_path, gone):
    """No broker, or no verifier: one line that says what to start, exit status 1, earlier results untouched."""
    (tmp_path / "results.jsonl").write_text("")
    reply = [Failed(job_id=0, code="no_verifier", reason="no verifier is registered")]
    with FakeBroker(lambda _: [] if gone else reply) as broker:
        outcome, _ = run(broker, tmp_path, GOOD, "--timeout-s", "0.3", "--no-wait")
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    assert ("make broker" if gone else "no verifier") in outcome.stderr


NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="no verifier is registered")


def test_a_verifier_is_waited_for(tmp_path):
    """It is said on standard error what for; when it is there, the run goes on."""
    questions = []

    def reply(message):
        if isinstance(message, FetchTokenizer) and len(questions) < 2:
            questions.append(message)
            return [NO_VERIFIER]
        return answer(message)

    with FakeBroker(reply) as broker:
        outcome, results = run(broker, tmp_path, GOOD, "--timeout-s", "0.4")
    assert (outcome.exit_code, [result["text"] for result in results]) == (0, [ANSWER])
    waits, goes_on = outcome.stderr.splitlines()
    assert f"waiting for a verifier to register with the broker at {broker.address}, at most 600 s" in waits
    assert "fake is served, after" in goes_on


def test_a_broker_is_waited_for(tmp_path, free_address, spawn):
    """One that is started after the command."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(GOOD)
    process = spawn("submit", str(prompts), "--out", str(out), "--broker", free_address, "--timeout-s", "0.4")
    while f"waiting for a broker at {free_address}" not in process.output.read_text():
        assert process.poll() is None
    with FakeBroker(endpoint=free_address):
        assert process.wait(20) == 0
    assert json.loads(out.read_text())["text"] == ANSWER


def test_the_wait_is_bounded(tmp_path):
    """After it, the reason, and exit status 1."""
    with FakeBroker(lambda _: [NO_VERIFIER]) as broker:
        outcome, _ = run(broker, tmp_path, GOOD, "--timeout-s", "0.2", "--wait-seconds", "0.3")
    assert outcome.exit_code == 1
    assert "at most 0.3 s" in outcome.stderr
    assert "no verifier is registered" in outcome.stderr.splitlines()[-1]


def test_ctrl_c_while_waiting_is_quiet(tmp_path, spawn):
    """One line said what was waited for, and no more is said."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD)
    with FakeBroker(lambda _: [NO_VERIFIER]) as broker:
        process = spawn("submit", str(prompts), "--broker", broker.address)
        while "waiting for" not in process.output.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
    assert process.output.read_text().count("\n") == 1


def test_all_counters_only_if_asked_for(broker, tmp_path):
    """Under a key of their own."""
    _, (line,) = run(broker, tmp_path, GOOD, "--verbose")
    assert list(line) == [*FIELDS, "internal"]
    assert line["internal"] == {name: STATS_SENT[name] for name in ("drafted", "stale", "accepted_lengths")}
    assert list(line["stats"]) == STATS
