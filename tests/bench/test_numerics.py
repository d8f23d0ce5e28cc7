"""`specq bench numerics` finds texts that depend on the batch, says how near a tie it was, and keeps to its time."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from bench import numerics
from bench.suites import numerics as suite
from specq.cli import main
from specq.engines import EngineSpec
from specq.protocol import Judgement, Logprobs, SamplingParams
from specq.protocol.step_output import NO_TAP, StepOutput

PROMPTS = [[5, 6, 7 + i] for i in range(20)]
GREEDY = SamplingParams(max_tokens=6, logprobs=20)


class Counting:
    """An engine whose model counts: token n is followed by n + 1, far ahead of n + 2; at `flips`, a tie, by n + 2 if
    the step has company."""

    def __init__(self, flips: tuple[int, ...] = ()) -> None:
        self.flips, self.widths = flips, []

    def open(self, session_id, token_ids, owner=""):
        return 0

    def close(self, session_id):
        pass

    def step(self, steps, tap=NO_TAP):
        self.widths.append(len(steps))
        return StepOutput([self._judge(step, alone=len(steps) == 1) for step in steps if step.judged])

    def _judge(self, step, *, alone):
        token, path, said, tops = int(step.token_ids[-1]), [], [], []
        drafts = iter(enumerate(step.tree.token_ids.tolist()))
        while True:
            tie = token in self.flips
            right = token + (2 if tie and not alone else 1)
            said.append(right)
            tops.append((0.0, -0.01 if tie else -3.0))
            node, drafted = next(drafts, (0, None))
            if drafted != right:
                break
            path.append(node)
            token = right
        ids = np.array([[token, token + 1]] * len(said), np.int32)
        logprobs = Logprobs(np.zeros(len(said), np.float32), ids, np.array(tops, np.float32))
        return Judgement(step.session_id, tuple(path), np.array(said, np.int32), logprobs)


def last(engine, prompts=PROMPTS, seconds=1e9):
    return list(numerics.compare(engine, prompts, GREEDY, seconds))[-1]


def test_texts_that_do_not_depend_on_the_batch():
    """All prompts are decoded one by one and sixteen at a time, with equal texts."""
    engine = Counting()
    told = last(engine).report()
    assert (told["texts"], told["tokens"], told["differing"]) == (20, 120, [])
    assert told["widest_gap"] is None
    assert (max(engine.widths), engine.widths[0]) == (16, 1)


def test_a_tie_that_falls_either_way_is_found():
    """The first difference of each text, with the gap of the two best scores there."""
    told = last(Counting(flips=(12,)), PROMPTS[:8]).report()
    reached = [i for i in range(8) if 7 + i <= 12 < 7 + i + 6]  # texts in which 12 is followed by another token
    assert [case["prompt"] for case in told["differing"]] == reached
    assert [case["token"] for case in told["differing"]] == [12 - (7 + i) for i in reached]
    assert told["widest_gap"] == pytest.approx(0.01, rel=1e-5)
    agreed = sum(12 - (7 + i) + 1 for i in reached) + 6 * (8 - len(reached))
    assert told["differing_per_token"] == round(len(reached) / agreed, 6)


def test_it_keeps_to_its_time(monkeypatch):
    """No prompt begins after the time is over. Those that began are compared."""
    ticks = iter(range(1000))
    monkeypatch.setattr(numerics.time, "monotonic", lambda: next(ticks))
    told = last(Counting(), seconds=4).report()
    assert (told["texts"], told["tokens"]) == (3, 18)


class Mortal(Counting):
    """Dies where the second block begins at the second temperature: at the first, its sessions open alone and
    together."""

    info = SimpleNamespace(dtype="float32")

    def __init__(self, model, **options):
        super().__init__()
        self.opened = Counter()

    def open(self, session_id, token_ids, owner=""):
        self.opened[session_id] += 1
        if self.opened[16] == 3:
            raise RuntimeError("the machine is gone")
        return super().open(session_id, token_ids)


def test_what_is_known_is_written_at_once(monkeypatch, tmp_path):
    """A run that dies in the second block of its second setting has written the first setting, and the block before."""
    out = tmp_path / "numerics.json"
    monkeypatch.setattr(suite, "ENGINES", SimpleNamespace(resolve=lambda name: EngineSpec(Mortal)))
    monkeypatch.setattr(suite, "shipped_token_ids", lambda _: PROMPTS)
    options = ["--dtype", "float32", "--device", "cpu", "--max-tokens", "6", "--out", str(out)]
    outcome = CliRunner().invoke(main, ["bench", "numerics", *options])
    assert str(outcome.exception) == "the machine is gone"
    written = json.loads(out.read_text())
    assert {key: one["texts"] for key, one in written["results"].items()} == {"float32 T=0": 20, "float32 T=0.8": 16}
    assert list(written["figures"]) == ["float32 T=0, texts that differ", "float32 T=0.8, texts that differ"]
    assert outcome.stderr.count("texts differ") == 3


@pytest.mark.slow
def test_a_real_engine_on_the_cpu(tmp_path):
    """The suite at its smallest: one prompt, both temperatures, float32; nothing differs."""
    out = tmp_path / "numerics.json"
    options = ["--device", "cpu", "--limit", "2", "--max-tokens", "4", "--seconds", "60", "--out", str(out)]
    outcome = CliRunner().invoke(main, ["bench", "numerics", *options])
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    assert {key: one["texts"] for key, one in report["results"].items()} == {"float32 T=0": 2, "float32 T=0.8": 2}
    assert [one["median"] for one in report["figures"].values()] == [0.0, 0.0]
