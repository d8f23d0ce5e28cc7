"""Grammars from the command line: `--grammar`, `--schema`, and keys of lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.protocol import GetStatus, Status, Submit
from specq.testing.fake_broker import FakeBroker, answer
from tests.each import each
from tests.submitting import run

pytestmark = pytest.mark.usefixtures("own_cache")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
TEXT = json.dumps({"json_schema": SCHEMA}, separators=(",", ":"))


@pytest.fixture
def broker():
    with FakeBroker() as found:
        yield found


@each("as_file", [False, True])
def test_a_grammar_is_json_or_a_file_of_it(broker: FakeBroker, tmp_path: Path, as_file: bool) -> None:
    """As an option; a key of a line overrides it, and null removes it. The order of a schema is kept."""
    path = tmp_path / "grammar.json"
    path.write_text(json.dumps({"json_schema": SCHEMA}, indent=2), "utf-8")
    lines = [{"prompt": "a"}, {"prompt": "b", "grammar": {"choice": ["x", "y"]}}, {"prompt": "c", "grammar": {}}]
    text = "\n".join(map(json.dumps, lines))
    told = str(path) if as_file else json.dumps({"json_schema": SCHEMA})
    before = broker.num_heard(Submit)
    outcome, results = run(broker, tmp_path, text, "--grammar", told, "--concurrency", "1", to_file=False)
    assert (outcome.exit_code, len(results)) == (0, 3), outcome.output
    jobs = broker.wait_for(Submit, before + 3)[before:]
    assert [job.params.grammar for job in jobs] == [TEXT, '{"choice":["x","y"]}', ""]
    assert all(f'"{name}"' in outcome.stdout for name in ("text", "finish_reason"))


def test_a_wrong_grammar_of_a_line_fails_that_line(broker: FakeBroker, tmp_path: Path) -> None:
    """The message names the field and what is allowed."""
    wrapped = {"json_schema": {"name": "x", "schema": SCHEMA}}
    grammars = {"ebnf": "x"}, {"regex": ""}, {"type": "integer"}, wrapped, None
    lines = [{"prompt": "a", "grammar": grammar} for grammar in grammars]
    outcome, results = run(broker, tmp_path, "\n".join(map(json.dumps, lines)))
    assert outcome.exit_code == 1
    kinds = "json_object, json_schema, regex, choice, lark, structural_tag, any"
    advice = '; give a JSON schema as {"json_schema": ...}'
    assert [result["error"] for result in results] == [
        f"line 1: grammar has 'ebnf', but must have exactly one of {kinds}",
        "line 2: grammar: regex is '', but must be a text that is not empty",
        f"line 3: grammar has 'type', but must have exactly one of {kinds}{advice}",
        "line 4: grammar: json_schema has only name, schema; give the value of schema itself",
        None,
    ]


@each(
    ("content", "reason"),
    [
        ('{"json_object"}', "is not valid JSON: Expecting ':' delimiter at line 1, column 15; expected an object with"),
        ("[]", "is [], but must be an object with one of json_object, json_schema,"),
        ('{"regex": NaN}', "cannot be read as JSON: NaN is not a number in JSON"),
        (b'{"regex": "\xff"}', "is not UTF-8 at byte 11"),
        ("{" * 2_000_000, "has 2000000 bytes; a grammar has at most 1048576"),
        (None, "cannot be read: No such file or directory; expected a file with a grammar"),
    ],
)
def test_an_unreadable_grammar(tmp_path: Path, content: Any, reason: str) -> None:
    """It is refused before anything is sent, with the place."""
    path = tmp_path / "grammar.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    outcome = CliRunner().invoke(main, ["submit", "-", "--grammar", str(path)], input='{"prompt": "a"}')
    assert outcome.exit_code == 2
    assert reason in outcome.stderr
    assert "--grammar" in outcome.stderr


def test_detached_jobs_ask_the_broker_too(broker: FakeBroker, tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "grammar": {"json_object": True}})
    outcome, _ = run(broker, tmp_path, f"{line}\n{line}\n", "--detach", to_file=False)
    assert outcome.exit_code == 0, outcome.output
    assert {job.params.grammar for job in broker.wait_for(Submit, 2)} == {'{"json_object":true}'}
    assert broker.num_heard(GetStatus) == 1


@each("options", [[], ["--detach"]])
def test_an_older_broker(tmp_path: Path, options: list[str]) -> None:
    """Lines with a grammar fail and say why. The others are served."""
    lines = [{"prompt": "a", "grammar": {"json_object": True}}, {"prompt": "b"}]
    with FakeBroker(lambda message: [Status(report={})] if isinstance(message, GetStatus) else answer(message)) as old:
        outcome, _ = run(old, tmp_path, "\n".join(map(json.dumps, lines)), *options, to_file=False)
        assert [job.params.grammar for job in old.wait_for(Submit)] == [""]
    assert outcome.exit_code == 1
    assert "is too old for a grammar of the kind json_object; it knows no grammars" in outcome.output


def test_texts_of_a_submission_follow_the_schema(broker: FakeBroker, tmp_path: Path) -> None:
    """It is a grammar for all lines but those that have one."""
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA, indent=1), "utf-8")
    lines = [{"prompt": "a"}, {"prompt": "b", "grammar": {"choice": ["x", "y"]}}]
    outcome, _ = run(broker, tmp_path, "\n".join(map(json.dumps, lines)), "--schema", str(path))
    assert outcome.exit_code == 0, outcome.output
    assert [job.params.grammar for job in broker.wait_for(Submit, 2)] == [TEXT, '{"choice":["x","y"]}']


def test_a_schema_and_a_grammar_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), "utf-8")
    both = ["--schema", str(path), "--grammar", TEXT]
    outcome = CliRunner().invoke(main, ["submit", "-", *both], input='{"prompt": "a"}')
    assert outcome.exit_code == 2
    assert "--schema and --grammar exclude each other" in outcome.stderr


def test_answers_of_a_chat_follow_the_schema(
    broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA, indent=1), "utf-8")
    outcome = CliRunner().invoke(main, ["chat", "--broker", broker.address, "--schema", str(path), "Who?"])
    assert outcome.exit_code == 0, outcome.output
    (job,) = broker.wait_for(Submit)
    assert job.params.grammar == TEXT


@each(
    ("content", "reason"),
    [
        (
            '{"type": "object",\n "properties": }',
            "is not valid JSON: Expecting value at line 2, column 16; expected a JSON",
        ),
        ('["a"]', "is ['a'], but must be a JSON schema such as"),
        (json.dumps({"title": "a" * 70_000}), "grammar has 70028 characters as JSON, but must have at most 65536"),
    ],
)
def test_a_wrong_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: str) -> None:
    """The message says what is wrong and where, before any process is started or anything is sent."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    path = tmp_path / "schema.json"
    path.write_text(content, "utf-8")
    for command in (["chat", "Who?"], ["submit", "-"]):
        outcome = CliRunner().invoke(main, [*command, "--schema", str(path)], input='{"prompt": "a"}')
        assert outcome.exit_code == 2
        assert reason in outcome.stderr
