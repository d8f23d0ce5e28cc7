"""Right answers: numbers out of texts, generated code in a process with limits, and both beside speed."""

import ast
import json
import os
import socket
from decimal import Decimal

import pytest

from bench import generated_code
from bench.accuracy import check_references, final_number, is_right, share_right
from bench.scenario import Completion
from bench.turns import Turn
from specq.protocol import ConfigError
from specq.samples import Prompt, Reference, load_prompts
from specq.testing.fake_broker import CODEC
from specq.testing.waiting import wait_until
from tests.each import each

TASK = Reference(
    prompt='import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """Of a circle."""\n',
    test="def check(candidate):\n    assert candidate(2) == math.pi * 4\n    assert half(2) == 1\n",
    entry_point="area",
)
BODY = "    return math.pi * r * r\n"
SIGNED = "def area(r):\n" + BODY
TRUNCATED = "\n\ndef other(:\n    return ("

# --- references -------------------------------------------------------------------------------------------------------


def test_bundled_prompts_have_right_answers():
    """GSM8K's are numbers, and HumanEval's tests are Python that checks a function of the prompt."""
    numbers, tasks = load_prompts(("gsm8k",), 1000, CODEC), load_prompts(("humaneval",), 1000, CODEC)
    assert (len(numbers), len(tasks)) == (100, 40)
    assert all(final_number(prompt.reference.answer) is not None for prompt in numbers)
    for prompt in tasks:
        found = {node.name for node in ast.parse(prompt.reference.test).body if isinstance(node, ast.FunctionDef)}
        assert "check" in found
        assert f"def {prompt.reference.entry_point}(" in prompt.reference.prompt
    check_references([*numbers, *tasks])


def test_files_as_published(tmp_path):
    """GSM8K and HumanEval keep their own keys, beside ordinary prompts; a byte order mark is skipped."""
    task = {"task_id": "HumanEval/9", "prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    task |= {"entry_point": "f", "test": "def check(candidate): pass"}
    lines = [{"question": "1 + 1?", "answer": "So <<1+1=2>>2\n#### 2"}, task, {"prompt": "1 + 1?", "id": "plain"}]
    path = tmp_path / "own.jsonl"
    path.write_text("\ufeff" + "\n".join(map(json.dumps, lines)), "utf-8")
    first, second, third = load_prompts((str(path),), 10, CODEC)
    assert first.reference == Reference(answer="So <<1+1=2>>2\n#### 2", prompt="1 + 1?")
    assert first.token_ids == third.token_ids
    assert (second.id, second.reference.test) == ("HumanEval/9", task["test"])
    assert second.reference.prompt == "def f():\n"
    assert (third.id, third.reference) == ("plain", None)


def test_prompts_without_right_answers_are_refused():
    with pytest.raises(ConfigError, match="no prompt has a right answer"):
        check_references([Prompt("a", "0", (1,))])


# --- numbers ----------------------------------------------------------------------------------------------------------


@each(("text", "number"), [
    ("She has 3 eggs.\n#### 18\nIt is 4 PM.", "18"),
    ("#### $1,234.50 dollars", "1234.5"),
    ("#### **-7**", "-7"),
    ("#### Step 2: add\nSo it is 20.", "20"),
    (r"Thus \boxed{1{,}200\text{ km}}, in 3 days", "1200"),
    (r"\boxed{x = \$5} of 6", "5"),
    ("In 2 weeks he makes $5,600,000.00.", "5600000"),
    ("10-4 = 6, then 6 - 9 = -3", "-3"),
    ("It costs -$12", "-12"),
    ("10-4", "4"),
    ("a loss of \N{MINUS SIGN}4 degrees", "-4"),
    ("Half is .5 liters.", "0.5"),
    ("1, 2, 3", "3"),
    ("It takes 36kg, or 50%.", "50"),
    ("no digits at all", None),
    ("", None),
])  # fmt: skip
def test_the_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_a_number_is_right_however_it_is_written():
    reference = Reference(answer="... #### 70,000")
    assert is_right(reference, "The profit is $70000.00.")
    assert not is_right(reference, "The profit is $7000.")
    assert not is_right(reference, "I do not know.")
    assert not is_right(Reference(answer="Paris"), "London")


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (BODY + TRUNCATED, True),
        (f"Here:\n\n```python\n{SIGNED}```\n\nIt squares 2.", True),
        (f"```\nprint(1)\n```\nor\n  ```py\n  {SIGNED.replace(chr(10), chr(10) + '  ')}", True),
        (f"Sure, like so.\n\n{SIGNED}\nThis squares r.", True),
        (f"{SIGNED}\n# For example:\nprint(area(\n```\n\nThis squares r.", True),
        (f"{BODY}```\nThis squares r.", True),
        (f"```python\n{BODY}```", True),
        (SIGNED.replace("math.pi", "3"), False),
        ("    exit(0)\n", False),
        ("I cannot.", False),
    ],
)
def test_code_is_run_with_its_tests(text, right):
    """Whether a text goes on where the prompt ends or defines the function anew, in a fence or between prose; imports
    and functions of the prompt are there."""
    assert is_right(TASK, text) is right


@pytest.mark.parametrize("code", ["x = 'a' * (3 << 30)", "import sys; sys.exit(86)", "def f(: pass", "input()"])
def test_what_does_not_come_to_its_end(code):
    assert generated_code.passes("import math, random, numpy\nassert __name__ != '__main__'")
    assert generated_code.passes(
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nassert P(1).x == 1"
    )
    assert generated_code.passes("import asyncio, os\nasyncio.run(asyncio.sleep(0))\nassert list(os.walk('.'))")
    assert not generated_code.passes("def f(x: Unknown) -> int: return 1")
    assert not generated_code.passes(code)


@pytest.mark.slow
def test_processor_time_has_a_limit(monkeypatch):
    monkeypatch.setattr(generated_code, "WALL_S", 1000)
    assert not generated_code.passes("while True: pass")


def test_files_processes_and_sockets_are_out_of_reach(tmp_path):
    kept, made = tmp_path / "kept", tmp_path / "made"
    kept.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        for code in (
            f"open({str(made)!r}, 'w')", f"import os; os.remove({str(kept)!r})", "import os; os.fork()",
            f"import shutil; shutil.rmtree({str(tmp_path)!r})", "import subprocess; subprocess.run(['true'])",
            f"import socket; socket.create_connection(('127.0.0.1', {port}))",
        ):  # fmt: skip
            assert generated_code.passes(f"try:\n    {code}\nexcept PermissionError: pass\nelse: 1/0"), code
        with pytest.raises(BlockingIOError):
            server.accept()
    assert kept.read_text() == "mine"
    assert not made.exists()


def test_the_process_group_is_killed(tmp_path, monkeypatch):
    """Also a process that was started past Python: it would hold the pipe open."""
    monkeypatch.setattr(generated_code, "WALL_S", 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert not generated_code.passes(f"import ctypes; ctypes.CDLL(None).system(b'sleep 600 > {pipe}')")
    wait_until(lambda: _is_closed(reader))
    os.close(reader)


def _is_closed(reader: int) -> bool:
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False


# --- counting ---------------------------------------------------------------------------------------------------------


def test_identical_texts_are_scored_once_for_all_contestants():
    """So contestants with the same texts are right equally often, in each repetition; prompts without a right answer
    are left out."""
    prompts = (Prompt("a", "0", (1,), Reference(answer="5")), Prompt("a", "1", (2,)), Prompt("b", "0", (3,), TASK))
    said = {("plain", 0): "5x-", ("plain", 1): "5x-", ("specq", 0): "5x-", ("specq", 1): "4x-"}
    turns = [
        Turn(name, repeat, prompts, [Completion([ord(letter)], 1.0) for letter in text], 1.0)
        for (name, repeat), text in said.items()
    ]
    judged = []

    def judge(reference, text):
        judged.append((reference.answer, text))
        return text != "4"

    found = share_right(turns, lambda token_ids: "".join(map(chr, token_ids)), judge)
    assert found == {"a": {"plain": [1, 1], "specq": [1, 0]}, "b": {"plain": [1, 1], "specq": [1, 1]}}
    assert judged == [("5", "5"), ("", "-"), ("5", "4")]
