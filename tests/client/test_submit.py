"""`specq submit`: files of prompts to files of results; formats, options, exit statuses."""

import json
import re

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.protocol import Failed, SamplingParams, Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS, CODEC, FakeBroker, answer, completion
from specq.testing.fake_broker import STATS as STATS_SENT
from tests.each import each
from tests.submitting import GOOD, run

pytestmark = pytest.mark.usefixtures("own_cache")
FIELDS = ["id", "prompt", "text", "token_ids", "finish_reason", "usage", "stats", "error"]
STATS = [
    "rounds", "draft_tokens", "accepted_tokens", "acceptance_rate", "mean_accepted_length", "tokens_per_second",
    "time_to_first_token_ms", "seed",
]  # fmt: skip


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
        "cached_tokens": 2,
    }
    assert results[1]["prompt"] == CODEC.render_chat(chat)
    assert {result["error"] for result in results} == {None}


def test_a_top_p_of_0_is_greedy(broker, tmp_path):
    """As an option and in a line, at any temperature: the job equals one of temperature 0."""
    given, plain = '{"prompt": "a", "top_p": 0, "temperature": 0.9}', '{"prompt": "a"}'
    by_line, _ = run(broker, tmp_path, given)
    by_option, _ = run(broker, tmp_path, plain, "--top-p", "0", "--temperature", "0.9")
    assert [by_line.exit_code, by_option.exit_code] == [0, 0], by_line.output
    greedy, _ = run(broker, tmp_path, plain)
    assert greedy.exit_code == 0
    assert {submit.params for submit in broker.wait_for(Submit, 3)} == {SamplingParams(max_tokens=99)}


def test_bad_lines_harm_no_others(broker, tmp_path):
    """Each bad line becomes an error line with its number; the others are complete; exit status 1."""
    bad = ["nonsense", '{"prompt": ""}', '{"prompt": "a", "temperature": -1}', '{"prompt": "a", "strategy": "x"}']
    bad += ['{"token_ids": [99999]}', '{"prompt": "a", "top_p": NaN}', '{"prompt": "a", "max_tokens": "b"}']
    bad += ['{"prompt": ["a", "b"]}', '{"token_ids": [[5], [6]]}']
    bad += ['{"prompt": "a", "temprature": 1}', json.dumps({"prompt": "a", "bad_token_ids": [[5, 6, 7]] * 9000})]
    bad += [json.dumps({"token_ids": [5] * 100}), '{"prompt": "\\ud800"}', '{"prompt": "a", "token_ids": [3]}']
    bad += ['{"prompt": "a", "id": ' + "[" * 900 + "]" * 900 + "}"]
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


def test_what_was_written_to_a_file_is_summed_up(broker, tmp_path):
    """On standard error, in a line; where a line failed, that is said instead."""
    outcome, results = run(broker, tmp_path, GOOD * 3)
    num_tokens = sum(len(result["token_ids"]) for result in results)
    a_round = num_tokens / sum(result["stats"]["rounds"] for result in results)
    assert re.fullmatch(
        rf"specq: 3 results written to \S+/results\.jsonl: {num_tokens} tokens in \d+\.\d s, {a_round:.1f} "
        r"tokens per round\n",
        outcome.stderr,
    )
    outcome, _ = run(broker, tmp_path, GOOD + '{"prompt": ""}\n')
    assert "written to" not in outcome.stderr
    assert "1 of 2 lines failed" in outcome.stderr


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


@each(
    ("options", "reason"),
    [
        (["--temperature", "-1"], "temperature"), (["--temperature", "nan"], "temperature"),
        (["--top-p", "-0.1"], "top_p"), (["--strategy", "wishful"], "deterministic"),
        (["--max-tokens", "0"], "max_tokens"), (["--max-tokens", "many"], "many"),
        (["--concurrency", "0"], "concurrency"), (["--config", "/no/such/file"], "/no/such/file"),
        (["--broker", "nonsense"], "nonsense"), (["--out", "/no/such/folder/x"], "/no/such/folder"),
        (["--wat"], "--wat"),
    ],
)  # fmt: skip
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


def test_all_counters_only_if_asked_for(broker, tmp_path):
    """Under a key of their own."""
    _, (line,) = run(broker, tmp_path, GOOD, "--verbose")
    assert list(line) == [*FIELDS, "internal"]
    assert line["internal"] == {name: STATS_SENT[name] for name in ("drafted", "stale", "accepted_lengths")}
    assert list(line["stats"]) == STATS
