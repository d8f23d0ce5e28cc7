"""`specq bench gpu`: contestants, tables, failures, and the suite on the CPU at its smallest."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from bench.end_to_end import contest, method_serving, serving, vllm, workload
from bench.end_to_end.contest import ContestPart
from bench.end_to_end.streams import Stream, StreamLoad
from bench.end_to_end.workload import Workload, check_engine
from bench.report import Report
from bench.suites import gpu
from specq.cli import main
from specq.models import resolve_model
from specq.protocol import ConfigError, EngineError
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import make_published

RATES = {"rates": [7.0], "tokens_per_second": 7.0}
WORK = Workload("pair", "cpu", [1, 8], 4, 2, [[5, 6], [7, 8]])


@pytest.fixture
def pair(tmp_path):
    """The bundled pair as it is, where the suite would make an inflated one."""
    folder = tmp_path / "pair"
    for role in ("target", "draft"):
        shutil.copytree(resolve_model("tiny", role), folder / role)
    return folder


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


# --- the workload -------------------------------------------------------------------------------------------------


def test_a_workload_outlives_its_process(tmp_path):
    path = tmp_path / "workload.json"
    WORK.save(path)
    assert Workload.load(path) == WORK


def test_each_contestant_gets_at_least_eight_jobs_and_three_per_session():
    assert [len(WORK.prompts_for(sessions)) for sessions in WORK.sessions] == [8, 24]


def test_no_fresh_prompt_comes_twice():
    """Neither in a run, nor in another repetition, load or variant; what all prompts begin with stays in front."""
    work = replace(WORK, sessions=[1, 2, 8], prompts=[[3, 5, 6], [3, 7, 8]], marks=[[0, 100 + i] for i in range(1000)])
    runs = []
    for variant in range(3):
        for load in work.loads:
            work.timed(load, lambda prompts, _num: runs.extend(prompts) or [Stream([1])], variant=variant)
    assert len(runs) == 3 * 3 * (8 + 8 + 24)
    assert len(set(map(tuple, runs))) == len(runs)
    assert {(tuple(run[:2]), len(run)) for run in runs} == {((3, 0), 5)}
    assert {tuple(run[3:]) for run in runs} == {(5, 6), (7, 8)}


def test_texts_of_one_prompt_have_different_tenants():
    """So that no text is drafted from an earlier one of the same prompt; those of different prompts share one."""
    tenants = []

    class Client:
        def complete(self, requests, _num_at_once, _patience):
            tenants.extend((request["token_ids"][0], request["tenant"]) for request in requests)
            assert all(request["tree"] == [[0]] for request in requests)
            return [(Stream([1]), SimpleNamespace(stats={}, internal={}, token_ids=[1])) for _ in requests]

    for load in (StreamLoad(1), StreamLoad(2)):
        work = Workload("pair", "cpu", [1, 2], 8, 1, [[5], [6]])
        completer = serving.Completer(Client(), load, work, "async", name="suffix", shape={"tree": [[0]]}, wave=2)
        for _ in range(2):
            completer.complete([[5], [6], [5], [6]], 1)
    assert len(set(tenants)) == len(tenants) == 16
    assert len({tenant for _, tenant in tenants}) == 8


def test_ways_to_draft_are_modes_and_shapes_of_jobs():
    """SSD's fan-outs ahead of the verdicts, and waited for where a round was not foreseen; a mode is a way by
    itself."""
    given = []

    class Client:
        def complete(self, requests, _num_at_once, _patience):
            given.extend((request["mode"], request.get("fan_out_hit")) for request in requests)
            return [(Stream([1]), SimpleNamespace()) for _ in requests]

    for way in serving.DEPLOYMENTS["ssd"]:
        assert serving._completer(Client(), StreamLoad(1), WORK, way).name == way
        serving._completer(Client(), StreamLoad(1), WORK, way).complete([[5]], 1)
    assert given == [("plain", None), ("async", None), ("async", [3] * 8), ("jit", [3] * 8)]
    assert serving.modes("ssd", replace(WORK, modes=("async",))) == ["async", "ssd", "ssd jit"]


def without_vllm(name, *_):
    return None if name == "vllm" else find_spec(name, *_)


@pytest.mark.parametrize(
    "asked", [("--engine", "vllm"), ("--only", "vllm-spec"), ("--engine", "vllm", "--only", "own")]
)
def test_without_vllm_what_needs_it_is_refused_before_a_pair_is_made(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(gpu, "find_spec", without_vllm)
    outcome = bench("gpu", "--pair", tmp_path / "pair", "--device", "cpu", *asked)
    assert outcome.exit_code == 2
    assert "needs vllm" in outcome.output
    assert not (tmp_path / "pair").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--engine-option", "helper_core=1"), "torch has no option helper_core; did you mean 'helper_cores'?"),
        (
            ("--tensor-parallel-size", "2"),
            "the torch engine runs on one GPU; --tensor-parallel-size needs --engine vllm",
        ),
    ],
)
def test_what_the_engine_does_not_take_is_refused_before_a_pair_is_made(tmp_path, asked, said):
    outcome = bench("gpu", "--pair", tmp_path / "pair", "--device", "cpu", "--only", "own", *asked)
    assert (outcome.exit_code, said in outcome.output) == (2, True)
    assert not (tmp_path / "pair").exists()


def test_gpus_of_a_layer_may_have_the_old_name(tmp_path):
    """It counts as the new one does, and says so; both are refused."""
    command = ("gpu", "--pair", tmp_path / "pair", "--device", "cpu", "--only", "own", "--tensor-parallel", "2")
    with pytest.warns(FutureWarning, match="tensor_parallel is now target.vllm.tensor_parallel_size"):
        assert "--tensor-parallel-size needs --engine vllm" in bench(*command).output
    assert "are both given" in bench(*command, "--tensor-parallel-size", "2").output
    assert "--tensor-parallel " not in bench("gpu", "--help").output


def test_without_vllm_its_contestants_are_skipped_unless_requested(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_spec", without_vllm)
    assert gpu._with_vllm(["own", "vllm", "vllm-spec"], (), "torch") == ["own"]
    assert "left out, since vllm is not installed: vllm, vllm-spec" in capsys.readouterr().err


def test_who_drafts_on_a_gpu_of_its_own_is_refused_without_one():
    """If it was not requested by name, it is skipped."""
    outcome = bench("gpu", "--only", "own", "--only", "two")
    assert (
        outcome.exit_code,
        "--only two drafts on a GPU beside the verifier's: it needs --gpus 2" in outcome.output,
    ) == (2, True)
    assert not {"two", "ssd"} & set(gpu._contestants((), 1, 1))
    assert "two" in gpu._contestants((), 2, 1)
    assert not {"two", "ssd"} & set(gpu._contestants((), 2, 2))
    with pytest.raises(click.UsageError, match="it needs --gpus 5"):
        gpu._contestants(("two-own",), 4, 4)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_who_drafts_beside_the_verifier_has_no_gpu_of_its(tensor_parallel_size: int):
    work = replace(WORK, device="cuda", engine="vllm", tensor_parallel_size=tensor_parallel_size)
    devices = {name: serving._config(name, work).draft.device for name in ("one", "two", "two-own")}
    assert devices == {
        "one": "cuda:0",
        "two": f"cuda:{tensor_parallel_size}",
        "two-own": f"cuda:{tensor_parallel_size}",
    }


@pytest.mark.parametrize("kind", method_serving.METHODS)
def test_a_draft_method_runs_in_a_verifier_without_other_sources(pair, kind):
    """It says which files it misses."""
    work = replace(WORK, pair=str(pair))
    if kind in ("parallel-colocated", "medusa", "eagle3", "eagle3-suffix", "block"):
        with pytest.raises(ConfigError, match=f"the method {kind} needs"):
            method_serving.method_config(kind, work)
        return
    config = method_serving.method_config(kind, work, "measured")
    target = config.target
    assert (target.drafts, target.model, config.up.drafters) == ("measured", f"{pair}/target", 0)
    assert bool(target.draft_model) == (kind == "draft-colocated")
    assert target.lookahead == (kind == "lookahead")
    assert (target.prompt_lookup == "none") == (kind not in ("lookup", "suffix"))


def test_heads_beside_the_target_are_found(pair):
    """Each method has its own and none of the others'."""
    make_eagle(pair / "eagle3", eagle_shape_of(256, 4096, 30), embedding=False)
    make_published(pair / "medusa", 256, 4096)
    make_block(pair / "block", block_shape_of(256, 4096, (1, 5)))
    work = replace(WORK, pair=str(pair))
    for kind, name in (("eagle3", "eagle3"), ("medusa", "medusa"), ("eagle3-suffix", "eagle3"), ("block", "block")):
        target = method_serving.method_config(kind, work).target
        assert (target.heads, target.draft_model) == (str(pair / name), "")
        assert (target.prompt_lookup == "none") == (kind == name)


def test_rates_of_all_repetitions_are_kept():
    """The first time is not counted, and may be short; each later one has a rate."""
    calls = []

    def complete(prompts, num_tokens):
        calls.append((len(prompts), num_tokens))
        return [Stream([1, 2, 3])] * len(prompts)

    found = WORK.timed(StreamLoad(1), complete)
    assert calls == [(8, workload.WARM_LEN), *[(8, 4)] * len(found["rates"])]
    assert len(found["rates"]) == 2
    assert found["texts"] == [[1, 2, 3]] * 4
    assert "itl_ms" not in found


def test_who_learns_what_pays_serves_for_a_while_before_it_is_timed(monkeypatch):
    """Each time takes a second of this clock."""
    calls, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr(workload, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def complete(_prompts, num_tokens):
        calls.append(num_tokens)
        clock.now += 1.0
        return [Stream([1, 2, 3])]

    replace(WORK, settle_s=2.5).timed(
        StreamLoad(1), complete, learns=True, warmed=lambda: calls.append("timed from here")
    )
    assert calls == [4, 4, 4, "timed from here", 4, 4]
    calls.clear()
    WORK.timed(StreamLoad(1), complete, learns=True)
    assert calls == [4, 4, 4]


def test_after_a_run_that_fails_there_are_no_more_and_those_before_it_stay():
    """The verifier may be lost, and each further job would wait for it in vain."""

    def fails():
        raise EngineError("out of memory")

    runs = [("plain", "1", lambda: {"rates": [7.0]}), ("sync", "1", fails), ("sync", "8", lambda: {"rates": [9.0]})]
    found = serving.until_one_fails(runs)
    assert found == {"plain": {"1": {"rates": [7.0]}}, "sync": {"1": {"error": "EngineError: out of memory"}}}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_a_run_that_is_cut_short_leaves_the_loads_before_and_is_measured_again(tmp_path, stop):
    """Ctrl-C, and SIGTERM, as of `timeout`."""
    is_stopped = True

    def second():
        if is_stopped:
            raise stop
        return RATES

    out = tmp_path / "report.json"
    report = Report("gpu", out)
    runs = [("plain", "1", lambda: RATES), ("plain", "8", second)]
    part = ContestPart("own", lambda _work: serving.until_one_fails(runs))
    with pytest.raises(type(stop)) as found:
        contest.run(report, WORK, [part])
    assert found.value is stop
    assert json.loads(out.read_text())["results"]["own"] == {"plain": {"1": RATES}, "error": "cut short"}
    is_stopped = False
    contest.run(report, WORK, [part])
    assert report.content["results"]["own"] == {"plain": {"1": RATES, "8": RATES}}


def test_warming_up_ends_before_the_first_repetition():
    calls = []

    def complete(_prompts, _num_tokens):
        calls.append("run")
        return [Stream([1])]

    WORK.timed(StreamLoad(1), complete, warmed=lambda: calls.append("warm"))
    assert calls == ["run", "warm", "run", "run"]


def test_the_first_temperature_has_all_sessions_and_the_others_those_for_sampling():
    """All sessions, too, where none are named; room is for the most of all."""
    work = replace(WORK, temperatures=[0.0, 0.8])
    assert [load.key for load in work.loads] == ["1", "8", "1 T=0.8", "8 T=0.8"]
    sampled = replace(work, sampled_sessions=[32])
    assert sampled.loads == [StreamLoad(1), StreamLoad(8), StreamLoad(32, 0.8)]
    assert sampled.most_sessions == 32
    assert sampled.kv_slots > work.kv_slots


def test_both_models_have_room_for_all_that_the_largest_run_computes():
    """With 128 sessions, too: prompts that are computed again in each repetition would be a handicap that rivals do not
    have."""
    work = Workload.of(Path("pair"), device="cpu", sessions=(1, 128), output_len=128, repeats=1)
    least = sum(len(prompt) + 128 for prompt in work.prompts_for(128))
    for name in serving.DEPLOYMENTS:
        config = serving._config(name, work)
        slots = [config.target.kv_slots, *([config.draft.kv_slots] if config.up.drafters else [])]
        assert min(slots) >= least
    assert config.target.max_sessions >= 128


def test_the_engine_in_vllm_has_the_rivals_context_and_gpus():
    """As an engine and as a rival, vLLM divides layers among as many GPUs; the torch engine is refused that."""
    work = Workload.of(
        Path("pair"), device="cpu", sessions=(1,), output_len=8, repeats=1, engine="vllm", tensor_parallel_size=2
    )
    target = serving.verifier_config(work, "").target
    assert (target.engine, target.engine_options) == ("vllm", ("max_model_len=2048", "tensor_parallel_size=2"))
    assert vllm._arguments(work, 0, "draft_model")["tensor_parallel_size"] == 2
    assert serving.verifier_config(WORK, "").target.engine_options == ()
    with pytest.raises(ConfigError, match="--tensor-parallel-size needs --engine vllm"):
        check_engine("torch", (), 2)


def test_deployments_take_further_engine_options_and_the_modes_that_are_asked_for():
    """None asked for: all of each."""
    given = {"engine_options": ("a=1",), "modes": ("async", "plain")}
    work = Workload.of(Path("pair"), device="cpu", sessions=(1,), output_len=8, repeats=1, engine="vllm", **given)
    assert serving.verifier_config(work, "").target.engine_options[-1] == "a=1"
    assert serving.modes("own", work) == ["plain", "async"]
    assert serving.modes("two-own", work) == ["async"]
    assert serving.modes("own", WORK) == ["plain", "sync", "async"]


# --- the suites on the CPU ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_deployment_on_the_cpu(tmp_path, pair):
    """A drafter in a process of its own, one session: both modes, and SSD's ways."""
    out = tmp_path / "gpu.json"
    options = [
        "--device",
        "cpu",
        "--pair",
        pair,
        "--sessions",
        1,
        "--output-len",
        4,
        "--repeats",
        1,
        "--settle-s",
        0,
        "--out",
        out,
    ]
    outcome = bench("gpu", "--only", "one", "--only", "ssd", "--gpus", 2, *options)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(out.read_text())
    names = ["one sync", "one async", "ssd plain", "ssd async", "ssd ssd", "ssd ssd jit"]
    assert list(found["figures"]) == [f"{name} S=1" for name in names], found["results"]
    assert found["results"]["ssd"]["ssd jit"]["1"]["drafted"] > 0
    assert found["settings"]["output_len"] == 4
    run = found["results"]["one"]["async"]["1"]
    assert run["num_steps"] > 0
    assert run["phases_ms"]["forward"] > run["phases_ms"]["judge"] > 0
    assert run["choices"]
    assert run["first_token_ms"] > 0
    assert run["itl_p99_ms"] >= run["itl_ms"] > 0
