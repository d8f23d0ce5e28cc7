"""`specq submit`: every parameter as an option and as a key of a line; several completions of a prompt."""

import json

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.cli.parameters import GROUPS
from specq.client import Piece, Result
from specq.client.parameters import NAMES
from specq.client.prompt_files import show_pieces
from specq.protocol import Failed, SamplingParams, Speculation, Submit
from specq.testing.fake_broker import ANSWER_IDS, CODEC, FakeBroker, answer
from specq.verification.noise import derived_seed
from tests.each import each
from tests.submitting import GOOD, run

pytestmark = pytest.mark.usefixtures("own_cache")


def test_every_parameter_is_an_option(broker, tmp_path):
    """What is asked for on the command line is what is sent, whole."""
    options = [
        "--temperature=0.5", "--top-k=4", "--top-p=0.9", "--min-p=0.1", "--seed=3", "--logprobs=2",
        "--max-tokens=30", "--min-tokens=2", "--stop=A", "--stop=B", "--stop-token-ids=5,6", "--ignore-eos",
        "--presence-penalty=0.1", "--frequency-penalty=0.2", "--repetition-penalty=1.1",
        "--logit-bias=42=-1.5", "--logit-bias", "7=2", "--bad-token-ids=8,9", "--bad-token-ids=10",
        "--strategy=typical", "--typical-eps=0.2", "--typical-delta=0.4",
        "--mode=sync", "--candidate-temp=0.6", "--candidate-top-p=0.8", "--max-depth=6", "--max-nodes=7",
        "--tree=[[0],[0,0],[1]]",
    ]  # fmt: skip
    outcome, _ = run(broker, tmp_path, '{"prompt": "a"}\n', *options)
    assert outcome.exit_code == 0, outcome.output
    (submit,) = broker.wait_for(Submit)
    assert submit.params == SamplingParams(
        temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=3, logprobs=2,
        max_tokens=30, min_tokens=2, stop=("A", "B"), stop_token_ids=(5, 6), ignore_eos=True,
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
        logit_bias=((42, -1.5), (7, 2.0)), bad_token_ids=((8, 9), (10,)),
        strategy="typical", typical_eps=0.2, typical_delta=0.4,
    )  # fmt: skip
    assert submit.speculation == Speculation(
        mode="sync", candidate_temp=0.6, candidate_top_p=0.8, max_depth=6, max_nodes=7, tree=((0,), (0, 0), (1,))
    )


def test_every_parameter_is_a_key_of_a_line(broker, tmp_path):
    """With the same effect as the option; what the line says wins."""
    keys = {"strategy": "threshold", "threshold": 0.3, "logit_bias": {"42": -1.5}, "bad_words": ["eggs"]}
    keys |= {"num_candidates": 3, "max_depth": 4, "stop_token_ids": [5], "fan_out_hit": None}
    lines = [json.dumps({"prompt": "a", **keys}), json.dumps({"prompt": "a", "tree": [[0], [1]], "num_candidates": 0})]
    options = ["--num-candidates", "2", "--bad-words", "two eggs", "--bad-words", "one"]
    outcome, _ = run(broker, tmp_path, "\n".join(lines), *options, "--concurrency", "1")
    assert outcome.exit_code == 0, outcome.output
    first, second = broker.wait_for(Submit, 2)
    assert (first.params.strategy, first.params.threshold) == ("threshold", 0.3)
    assert (first.params.logit_bias, first.params.stop_token_ids) == (((42, -1.5),), (5,))
    assert set(first.params.bad_token_ids) == {tuple(CODEC.encode_part(word)) for word in ("eggs", " eggs")}
    assert first.speculation == Speculation(num_candidates=3, max_depth=4)
    assert second.speculation == Speculation(tree=((0,), (1,)))
    assert tuple(CODEC.encode_part("two eggs")) in second.params.bad_token_ids


def test_no_parameter_is_forgotten():
    """Each has an option, in some group of the help; no option stands for none."""
    listed = [name for group in GROUPS.values() for name in group]
    shown = CliRunner().invoke(main, ["submit", "--help"]).stdout
    assert sorted(listed) == sorted(NAMES)
    assert all(f"  --{name.replace('_', '-')} " in shown for name in NAMES)
    headings = [line[:-1] for line in shown.splitlines() if line[:1].strip() and line.endswith(":")]
    assert headings == ["Prompts and results", *GROUPS, "Options"]


@each(
    ("options", "reason"),
    [
        (["--n", "0"], "n is 0, but must be a whole number in [1, 128]"),
        (["--threshold", "0.1"], "threshold is given with strategy deterministic"),
        (["--mode", "fast"], "mode is 'fast', but must be one of async, sync, plain"),
        (["--mode", "plain", "--max-depth", "3"], "max_depth is given with mode plain"),
        (["--num-candidates", "2", "--tree", "[[0]]"], "tree and num_candidates"),
        (["--tree", "[[0"], "'[[0' is neither a list of paths such as [[0],[0,0],[1]]"),
        (["--tree", "[[99]]"], "non-empty paths of ranks in [0, 64)"),
        (["--logit-bias", "42"], "'42' is not a token id with a bias; expected e.g. 42=-1.5"),
        (["--logit-bias", "42=nan"], "a bias in [-100, 100]"),
        (["--stop-token-ids", "5,x"], "'5,x' is not a list of integers; expected e.g. 5,17"),
        (["--bad-words", " "], "bad_words"),
        (["--frequency-penalty", "3"], "frequency_penalty is 3.0, but must be in [-2, 2]"),
        (["--logprobs", "21"], "logprobs is 21, but must be from 0 to 20, or -1 for none"),
    ],
)
def test_bad_values(broker, tmp_path, options, reason):
    """Each is refused with its name, its value and what is allowed, before any prompt is sent."""
    outcome, _ = run(broker, tmp_path, GOOD, *options)
    assert outcome.exit_code == 2
    assert reason in outcome.stderr.splitlines()[-1]
    assert broker.num_heard(Submit) == 0


def test_bad_values_of_a_line(broker, tmp_path):
    """Are refused with the same words, and harm no other line."""
    bad = [
        {"n": 0},
        {"threshold": 0.1},
        {"mode": "fast"},
        {"logit_bias": {"42": 101}},
        {"bad_words": [3]},
        {"tree": [[]]},
    ]
    outcome, results = run(broker, tmp_path, "".join(json.dumps({"prompt": "a", **keys}) + "\n" + GOOD for keys in bad))
    assert outcome.exit_code == 1
    assert [result["error"] for result in results[1::2]] == [None] * len(bad)
    for number, (keys, result) in enumerate(zip(bad, results[::2], strict=True)):
        assert result["error"].startswith(f"line {2 * number + 1}: {next(iter(keys))} is ")


# --- several completions ------------------------------------------------------------------------------------------


def test_a_line_for_each_completion(broker, tmp_path):
    """In order, with their indices where there are several, each with usage and statistics of its own."""
    lines = '{"prompt": "a", "id": "x"}\n{"prompt": "b", "n": 1}\n{"prompt": "", "id": "y"}\n{"prompt": "c"}\n'
    outcome, results = run(broker, tmp_path, lines, "--n", "3", "--temperature", "0.8", "--seed", "5")
    assert outcome.exit_code == 1
    whole = [("x", 0), ("x", 1), ("x", 2), (2, None), ("y", None), (4, 0), (4, 1), (4, 2)]
    assert [(result["id"], result.get("index")) for result in results] == whole
    seeds = [derived_seed(5, index) for index in range(3)]
    assert [result["stats"].get("seed") for result in results] == [*seeds, 5, None, *seeds]
    assert [list(result)[:3] for result in results[:4]] == [["id", "index", "prompt"]] * 3 + [["id", "prompt", "text"]]
    assert {result["usage"]["completion_tokens"] for result in results if not result["error"]} == {len(ANSWER_IDS)}
    assert "1 of 8 lines failed: line 3" in outcome.stderr


def test_a_completion_that_fails(tmp_path):
    """Stands in its line, with the line of the prompt; the others are unharmed."""
    failing = derived_seed(5, 1)

    def reply(message):
        if isinstance(message, Submit) and message.params.seed == failing:
            return [Failed(job_id=message.job_id, code="engine", reason="it broke")]
        return answer(message)

    with FakeBroker(reply) as broker:
        outcome, results = run(broker, tmp_path, '{"prompt": "a"}\n', "--n", "3", "--seed", "5")
    assert outcome.exit_code == 1
    assert [result["error"] for result in results] == [None, "line 1: it broke", None]
    assert [result["index"] for result in results] == [0, 1, 2]


@each("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_texts_are_shown_one_after_the_other(order):
    """Each text is shown as soon as it is its turn, in any order of completion."""
    results = [Result("x", "p", index=i) for i in range(3)]
    pieces = [Piece(f"{i}a", index=i) for i in order] + [Piece(f"{i}b", index=i, result=results[i]) for i in order]
    shown, seen = [], []

    def told():
        for piece in pieces:
            seen.append("".join(shown))
            yield piece

    assert show_pieces(told(), shown.append) == results
    assert "".join(shown) == "0a0b\n1a1b\n2a2b\n"
    assert seen[3].startswith("0a")


def test_stream_shows_all_completions(broker, tmp_path):
    """One after the other."""
    outcome, results = run(broker, tmp_path, GOOD, "--stream", "--stop", "END", "--n", "2")
    assert outcome.stdout == 2 * "A wörld of eggs.\n\n"
    assert len(results) == 2
