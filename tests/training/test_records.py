"""What a run is given: files of records, and numbers. What is wrong is named in one line, before anything is
trained."""

from __future__ import annotations

import gzip
import json
from math import inf, nan

import pytest
import torch
from click.testing import CliRunner

from specq.cli import main
from specq.protocol import ConfigError
from specq.training.optimizer import check_losses
from specq.training.records import DOCUMENTS, PROMPTS, bench_paths, read_records, shard_paths
from specq.training.rollouts import save_rollouts
from specq.training.runs import TrainingRun
from tests.each import each
from tests.training.stages import empty_places, make_places, runner
from tests.training.stages import refusal as refusal_of

GOOD = b'{"prompt": "How many figs?", "response": "2"}\n'
WHOLE = gzip.compress(GOOD * 3)


def refusal(path, forms=DOCUMENTS):
    with pytest.raises(ConfigError) as refused:
        list(read_records(path, forms))
    return str(refused.value)


@each(
    "line",
    [b"figs\n", b"[1]\n", b'{"x": 1}\n', b'{"prompt": "How many?"}\n', b'{"prompt": 3, "response": "2"}\n', b"\n"],
)
def test_an_invalid_record_line_is_named_with_the_right_form(tmp_path, line):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + line))

    said = refusal(path)

    assert f"{path}:2: " in said
    assert '{"prompt": "...", "response": "..."} or {"text": "..."}' in said


@each("data", [WHOLE[:-9], WHOLE[:4], b"figs", gzip.compress(b'{"prompt": "\xff"}'), WHOLE[:12] + b"\0" * 9])
def test_a_file_that_cannot_be_read_is_named(tmp_path, data):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)

    assert str(path) in refusal(path)


def test_a_limit_leaves_the_others_unread(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"figs\n")

    assert list(read_records(path, PROMPTS, 1)) == [json.loads(GOOD)]


@each(("paths_of", "pattern"), [(shard_paths, "*.jsonl.gz"), (bench_paths, "*.jsonl")])
def test_a_folder_without_files_is_named(tmp_path, paths_of, pattern):
    with pytest.raises(ConfigError, match=f"no {pattern.replace('*', '.')}.* in {tmp_path}"):
        paths_of(tmp_path)


@each(
    ("method", "option", "values"),
    [
        (method, option, values)
        for method in ("draft", "eagle3", "medusa", "parallel")
        for option, values in {
            "seconds": (0, -1, nan, inf), "rollout-seconds": (-1, nan, inf), "rollout-rows": (0, -4),
            "rollout-tokens": (0, -1), "bench-prompts": (0,), "bench-tokens": (0,), "limit": (0, -1),
            "seed": (-1, 2**32), "head-size": (0,), "batch-tokens": (0,), "lr": (0, -1, nan, inf),
            "matrix-lr": (-1, nan, inf), "hard-weight": (-0.1, 7, nan),
        }.items()
    ]
    + [(method, "depth-decay", (0, -1, 2, nan)) for method in ("eagle3", "medusa", "parallel")]
    + [("draft", option, (0, -1)) for option in ("hidden-size", "num-layers", "head-dim", "embedding-rank")]
    + [("parallel", "keep", (nan,))]
    + [("pair", option, (0, -1)) for option in ("steps", "row-length", "batch-tokens", "num-rollouts", "limit")]
    + [("pair", option, (nan, -1)) for option in ("target-lr", "draft-lr", "weight-decay", "hard-weight")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(method, option, values, tmp_path):
    target = [] if method == "pair" else ["--target=tiny"]
    stage = "tokenizer" if method == "pair" else "rollouts"
    for value in values:
        result = CliRunner().invoke(
            main, ["train", method, *target, f"--corpus={tmp_path}", f"--{option}={value}", stage]
        )

        assert result.exit_code == 2, (value, result.output)
        assert f"'--{option}'" in result.stderr, value


def test_a_run_that_diverged_is_not_written(tmp_path):
    network = torch.nn.Linear(2, 2)
    run = TrainingRun(network, [], tmp_path / "training.pt", "figs")

    with pytest.raises(ConfigError, match="after step 1: training has diverged; give lower rates"):
        run.fit(lambda: network(torch.full((2,), nan)), [1.0, 1.0], 1e-9, "head")

    assert not list(tmp_path.iterdir())


def test_a_nan_loss_is_refused():
    for loss in (nan, inf):
        with pytest.raises(ConfigError, match="after step 3: training has diverged; give lower rates"):
            check_losses([1.0, loss], 3)


@each(("hidden", "head"), [(100, 64), (32, 64), (21, 7)])
def test_sizes_of_a_draft_that_do_not_fit_together_are_refused(hidden, head, tmp_path):
    save_rollouts(tmp_path / "a.npz", [([5, 6, 7], [8, 9])])
    run = runner("draft", ["--device=cpu", f"--rollouts={tmp_path / 'a.npz'}"])

    said = refusal_of(run(empty_places(tmp_path), f"--hidden-size={hidden}", f"--head-dim={head}", "draft"))

    assert f"--hidden-size is {hidden} and --head-dim {head}" in said


@each("device", ["figs", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(device, tmp_path):
    said = refusal_of(runner("medusa", [f"--device={device}"])(make_places(tmp_path), "rollouts"))

    assert f"device is {device!r}" in said
    assert "cpu" in said


@each("left", [b"", b"figs", b"\x80\x02figs"])
def test_a_run_whose_file_was_spoilt_says_so_in_one_line(left, tmp_path):
    network, path = torch.nn.Linear(2, 2), tmp_path / "training.pt"
    path.write_bytes(left)

    with pytest.raises(ConfigError, match=r"cannot be read; delete it to start over: .") as refused:
        TrainingRun(network, [], path, "figs").resume(torch.device("cpu"))

    assert "\n" not in str(refused.value)
