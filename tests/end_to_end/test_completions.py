"""What a client asks for besides the prompt, honoured by real processes over TCP: several completions, words, trees."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specq import Client
from specq.processes.up import Group
from specq.verification.noise import derived_seed
from tests.deploying import QUESTION, group_of, ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEP_ROWS = 64
SEEDS = [derived_seed(7, index) for index in range(3)]


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A verifier whose steps have few rows and which drafts nothing itself but uses all drafts, and a drafter;
    frequent heartbeats."""
    target = {"max_step_rows": STEP_ROWS, "prompt_lookup": "none", "drafts": "always"}
    with ready(group_of(up={"drafters": 1}, broker={"heartbeat_ms": 50}, target=target)) as running:
        yield running


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with Client(group.address) as one:
        yield one


# --- several completions ------------------------------------------------------------------------------------------


def test_completions_are_those_of_their_seeds(client: Client) -> None:
    """At T = 0.8, three completions of one prompt say what three jobs with their seeds say, and not all the same."""
    params: dict[str, Any] = {"messages": QUESTION, "temperature": 0.8, "max_tokens": 40}
    together = client.generate(n=3, seed=7, **params)
    alone = [client.generate(seed=seed, **params) for seed in SEEDS]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert len({result.text for result in together}) > 1
    assert [(result.index, result.stats["seed"]) for result in together] == list(enumerate(SEEDS))


class Verifier:
    """The verifier as its heartbeats show it when it is at rest: no session holds a slot."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._steps = self._steps_at_rest(-1)

    def steps_of(self, prompt: list[int], **params: Any) -> int:
        """Complete a prompt by itself, without drafts; return the number of steps that it took."""
        before = self._steps
        self._client.submit(token_ids=prompt, mode="plain", ignore_eos=True, max_tokens=16, **params).results(60)
        self._steps = self._steps_at_rest(before)
        return self._steps - before

    def _steps_at_rest(self, before: int) -> int:
        deadline = time.monotonic() + 30
        while True:
            (target,) = [worker for worker in self._client.status()["workers"] if worker["role"] == "target"]
            if target["steps"] > before and target["free_slots"] == self._client.model.kv_slots:
                return int(target["steps"])
            assert time.monotonic() < deadline, f"no heartbeat showed the verifier at rest: {target}"


def test_the_prompt_is_computed_once(client: Client) -> None:
    """A step takes 64 rows, so that a long prompt takes many; those of three completions are those of one."""
    verifier = Verifier(client)
    words = client.served.codec.encode_part("the pencils in the boxes are counted again, and ") * 200
    prompts = [[first, *words[:1500]] for first in (5, 6)]
    steps_of_prompt = len(prompts[0]) // STEP_ROWS
    one = verifier.steps_of(prompts[0])
    three = verifier.steps_of(prompts[1], n=3, seed=7, temperature=0.8)
    assert one > steps_of_prompt
    assert three - one < steps_of_prompt  # a session that shares no KV would take that many more


def test_submit_writes_a_line_for_each(group: Group, tmp_path: Path) -> None:
    """In order, and a line by itself with a completion's seed says the same."""
    lines = [{"messages": QUESTION, "n": 2, "seed": 7}, {"messages": QUESTION, "seed": SEEDS[1]}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--temperature", "0.8", "--max-tokens", "24", "--logprobs", "1", "--tree", "[[0],[0,0],[1]]"]
    command = ["submit", str(source), "--out", str(out), "--broker", group.address, *options]
    done = subprocess.run([sys.executable, "-m", "specq", *command], capture_output=True, timeout=90, check=False)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert (done.returncode, [result.get("index") for result in results]) == (0, [0, 1, None])
    assert results[1]["token_ids"] == results[2]["token_ids"]
    assert all(len(result["logprobs"]) == len(result["token_ids"]) for result in results)


# --- words and trees ----------------------------------------------------------------------------------------------


def runs(token_ids: list[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(token_ids[i : i + length]) for i in range(len(token_ids) - length + 1)}


def test_bad_words_never_come(client: Client) -> None:
    """Neither spelling of the words of a text is in it once they are banned; the text goes on without them."""
    codec = client.served.codec
    plain = client.generate(messages=QUESTION, max_tokens=40)
    words = sorted({word for word in plain.text.split() if word.isalpha()})
    banned = client.generate(messages=QUESTION, max_tokens=40, bad_words=words)
    spellings = [tuple(codec.encode_part(space + word)) for word in words for space in ("", " ")]
    assert len(words) > 2
    assert any(spelling in runs(plain.token_ids, len(spelling)) for spelling in spellings)
    assert not any(spelling in runs(banned.token_ids, len(spelling)) for spelling in spellings)
    assert len(banned.token_ids) > 5


@pytest.mark.parametrize(
    ("drafting", "leaves", "depth"),
    [({"tree": [[0], [0, 0], [1]]}, 2, 2), ({"num_candidates": 3, "max_depth": 2}, 3, 2), ({"max_depth": 4}, 64, 4)],
    ids=["tree", "candidates", "depth"],
)
def test_drafting_parameters_shape_the_trees(client: Client, drafting: dict[str, Any], leaves: int, depth: int) -> None:
    """What is verified has no more leaves and levels than was asked for, and the text is the same."""
    params: dict[str, Any] = {"messages": QUESTION, "max_tokens": 80, "ignore_eos": True}
    plain = client.generate(mode="plain", **params)
    assert plain.stats["draft_tokens"] == plain.stats["candidates"] == 0
    for _ in range(50):  # on a busy machine all drafts of a short text may come too late
        drafted = client.generate(**params, **drafting)
        assert drafted.token_ids == plain.token_ids
        if drafted.stats["draft_tokens"]:
            break
    assert drafted.stats["draft_tokens"] > 0
    assert 1 <= drafted.stats["candidates"] <= leaves
    assert 1 <= drafted.stats["depth"] <= depth
