"""`specq bench gpu`: contestants, tables, failures, and the suite on the CPU at its smallest."""

import json
import queue
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from bench.end_to_end import contest, method_serving, serving, table, vllm, workload
from bench.end_to_end.contest import ContestPart
from bench.end_to_end.listening import ListeningClient
from bench.end_to_end.streams import Repetitions, Stream, StreamLoad, busy_rate, latencies
from bench.end_to_end.workload import Workload, check_engine
from bench.report import Report
from bench.step_split import StepSplit, split
from bench.suites import gpu
from specq.cli import main
from specq.models import resolve_model
from specq.protocol import ConfigError, EngineError
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


def test_a_run_has_a_fixed_number_of_jobs_per_session_and_at_least_eight():
    work = Workload("pair", "cpu", [4], 8, 1, [[5], [6]], jobs_each=6)
    assert [len(work.prompts_for(sessions)) for sessions in (1, 2, 4)] == [8, 12, 24]
    assert len(Workload("pair", "cpu", [4], 8, 1, [[5], [6]]).prompts_for(4)) == 12


def test_lengths_are_spread_evenly_and_are_the_same_in_each_run():
    """And the KV memory holds them all."""
    even, spread = (Workload("pair", "cpu", [64], 100, 1, [[1]] * 65, length_spread=share) for share in (0.0, 0.3))
    assert even.lengths(5, 100) == [100] * 5
    lengths = spread.lengths(192, 100)
    assert lengths == spread.lengths(192, 100)
    assert lengths[:64] == spread.lengths(64, 100)
    assert (min(lengths), max(lengths)) == (70, 130)
    for first in range(0, 192, 64):
        assert abs(sum(lengths[first : first + 64]) / 64 - 100) < 2
    assert spread.lengths(3, 1) == [1, 1, 1]
    assert spread.kv_slots - even.kv_slots == sum(lengths) - 192 * 100

    asked = []
    client = SimpleNamespace(complete=lambda requests, *_: asked.extend(one["max_tokens"] for one in requests) or [])
    serving.Completer(client, StreamLoad(64), spread, "plain").complete([[1]] * 192, 100)
    assert asked == lengths


class _Scripted(ListeningClient):
    """A client whose jobs end when their ends are asked for, the last one first, and among them one that was asked for
    earlier."""

    def __init__(self):
        self.ended, self.running, self.most = self, [], 0

    def submit(self, *, seed):
        self.running.append(job := _ended_job(seed))
        self.most = max(self.most, len(self.running))
        if seed == 2:
            self.running.append(_ended_job(-1))
        return job

    def get(self, timeout):
        if not self.running:
            raise queue.Empty
        return self.running.pop()


def _ended_job(seed):
    return SimpleNamespace(id=seed, started=0.0, arrivals=[], result=lambda: SimpleNamespace(token_ids=[seed]))


def test_jobs_run_with_limited_concurrency_and_answers_keep_order():
    client = _Scripted()
    requests = [{"seed": seed} for seed in range(10)]
    assert [result.token_ids for _, result in client.complete(requests, 3, 1.0)] == [[seed] for seed in range(10)]
    assert client.most == 3
    assert not client.running
    client.submit = _ended_job  # none of them ends
    with pytest.raises(TimeoutError, match="none of 3 jobs ended in 1 s"):
        client.complete(requests, 3, 1.0)


@pytest.mark.parametrize("kind", method_serving.METHODS)
def test_a_draft_method_runs_in_a_verifier_without_other_sources(pair, kind):
    """It says which files it misses."""
    work = replace(WORK, pair=str(pair))
    if kind in ("parallel-colocated", "medusa", "eagle3", "eagle3-suffix"):
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
    work = replace(WORK, pair=str(pair))
    for kind, name in (("eagle3", "eagle3"), ("medusa", "medusa"), ("eagle3-suffix", "eagle3")):
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


def test_the_busy_rate_ends_when_the_last_job_is_asked_for():
    """Of three jobs, two at a time: six tokens of the first, two of the other by 3.0, when the third began, which does
    not count."""
    first, second = Stream([1] * 6, 1.0, [1.5, 2.0, 3.0]), Stream([1] * 4, 1.0, [2.0, 3.5])
    last = Stream([1] * 4, 3.0, [3.5, 4.0])
    assert busy_rate([first, second, last]) == [4.0]
    assert busy_rate([Stream([1, 2], 1.0, [2.0]), Stream([1, 2], 1.0, [2.0])]) == []
    assert busy_rate([Stream([1]), Stream([2])]) == []


def test_latencies_are_of_arrivals_not_of_tokens():
    """Three tokens that come together are one arrival; a token's time is all after the first arrival over all after the
    first token."""
    streams = [Stream([1, 2, 3, 4], 1.0, [1.5, 1.75]), Stream([1, 2], 2.0, [2.25, 2.75]), Stream([7])]
    expected = {"first_token_ms": 375.0, "itl_ms": 375.0, "itl_p99_ms": 500.0, "tpot_ms": pytest.approx(291.67)}
    assert latencies(streams) == expected
    assert latencies([Stream([7])]) == {}


def test_the_99th_percentile_leaves_out_one_of_a_hundred_gaps():
    arrivals = [float(i) for i in range(100)]
    late = Stream([1] * 101, 0.0, [*arrivals, 150.0])
    assert latencies([late])["itl_p99_ms"] == 1000.0


def test_a_repetitions_rate_is_all_tokens_over_all_seconds():
    found = Repetitions(StreamLoad(2, 0.8))
    found.add(lambda: [Stream([1, 2]), Stream([3])])
    figures, (rate,) = found.figures(), found.rates
    assert rate == pytest.approx(3 / found.seconds)
    assert (figures["sessions"], figures["temperature"]) == (2, 0.8)
    assert figures["per_user"] == pytest.approx(rate / 2, abs=0.1)


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


# --- where the time of steps went -----------------------------------------------------------------------------------

BEFORE = {"step_us": {"forward": [9000, 1, 2], "host": [500, 1]}}
AFTER = {"step_us": {"wait": [2000, 0, 4], "plan": [400, 4], "forward": [49_000, 1, 5, 1], "host": [3300, 2]}}


def test_phases_are_means_of_the_steps_between_two_reports():
    """Four more steps; what a report leaves out is 0."""
    phases = {"wait": 0.5, "plan": 0.1, "forward": 10.0, "judge": 0.0, "host": 0.7}
    assert split(BEFORE, AFTER) == {"num_steps": 4, "phases_ms": phases, "host_ms": 1.3, "wait_ms": 0.5}
    assert split(AFTER, AFTER)["host_ms"] == 0.0


class Reports:
    """A client whose broker knows the steps of one verifier; the last report is given again and again."""

    def __init__(self, *workers):
        self._workers = list(workers)

    def status(self):
        worker = self._workers.pop(0) if len(self._workers) > 1 else self._workers[0]
        return {"workers": [{"role": "draft", "steps": 0}, {"role": "target", "name": "t", **worker}]}


def test_a_report_counts_when_the_verifier_has_beaten_since_its_last_step():
    """What the broker knows right after the last job is older than the job's last steps."""
    idle = {"steps": 3, "metrics": BEFORE}
    late, done = {"steps": 5, "metrics": BEFORE}, {"steps": 7, "metrics": AFTER | {"choices": {"suffix": [1, 5]}}}
    found = StepSplit(Reports(idle, idle, late, done), heartbeat_ms=0)
    found.begin()
    figures = found.figures()
    assert (figures["num_steps"], figures["choices"]) == (4, {"suffix": [1, 5]})


def test_a_verifier_that_goes_on_by_itself_is_an_error():
    busy = ({"steps": i, "metrics": {}} for i in range(100))
    with pytest.raises(EngineError, match="t does not come to rest"):
        StepSplit(Reports(*busy), heartbeat_ms=0).begin()


# --- contestants --------------------------------------------------------------------------------------------------


RATES = {"tokens_per_second": 8.0, "rates": [7.0, 9.0], "sessions": 1, "temperature": 0.0}


def fail(_work):
    raise EngineError("out of memory")


def test_one_that_fails_is_reported_and_the_others_go_on(tmp_path, capsys):
    """Its error stands in the report, and it has no row."""
    report = Report("gpu", tmp_path / "gpu.json")
    good = {"plain": {"1": RATES}}
    assert contest.run(report, WORK, [ContestPart("own", fail), ContestPart("one", lambda _: good)]) == ["own"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["results"] == {"own": {"error": "EngineError: out of memory"}, "one": good}
    assert found["figures"] == {"one plain S=1": {"unit": "tokens/s", "median": 8.0, "repeats": [7.0, 9.0]}}
    printed = capsys.readouterr()
    assert "out of memory" in printed.err
    assert len(printed.out.splitlines()) == 2


def test_a_delay_that_fails_is_named(tmp_path):
    found = {"plain 1 ms": {"1": RATES}, "error 20 ms": "EngineError: out of memory"}
    assert contest.run(Report("gpu", tmp_path / "gpu.json"), WORK, [ContestPart("far", lambda _: found)]) == [
        "far 20 ms"
    ]


def test_variants_of_one_contestant_are_put_together_and_what_is_there_is_not_measured_again(tmp_path):
    """A variant that failed before is; so is a contestant that failed."""
    out, measured = tmp_path / "gpu.json", []
    report = Report("gpu", out)

    def part(name, variant=""):
        def measure(_work):
            measured.append(name + variant)
            return {variant or "plain": {"1": RATES}}

        return ContestPart(name, measure, variant)

    parts = [ContestPart("own", fail), part("vllm-spec", "K=2"), ContestPart("vllm-spec", fail, "K=3")]
    assert contest.run(report, WORK, parts) == ["own", "vllm-spec K=3"]
    again = Report("gpu", out)
    again.resume()
    assert contest.run(again, WORK, [part("own"), part("vllm-spec", "K=2"), part("vllm-spec", "K=3")]) == []
    assert measured == ["vllm-specK=2", "own", "vllm-specK=3"]
    results = json.loads(out.read_text())["results"]
    assert {"K=2", "K=3"} <= set(results["vllm-spec"])
    assert set(results["own"]) == {"plain"}


def test_rates_have_rows_and_figures():
    """Failures and entries without a rate have no row. Columns without information are left out."""
    found = {"K=3": {"1": {"error": "no room"}}, "engine plain": {"max_num_seqs": 128}}
    assert table.table("vllm", found) == []
    assert table.figures("vllm", found) == {}
    rates = {"plain": {"1": RATES}, "sync": {"1": RATES | {"tokens_per_second": 12.0, "step_ms": 9.0}}}
    assert table.notes("vllm", found) == ["vllm, engine plain: max_num_seqs 128"]
    header, plain, sync = table.table("own", rates)
    assert header == ("CONTESTANT", "T", "SESSIONS", "TOKENS/S", "STEP MS", "TO PLAIN")
    assert plain == ("own plain", 0.0, 1, 8.0, "", "")
    assert sync == ("own sync", 0.0, 1, 12.0, 9.0, 1.5)


def rated(value):
    return {"tokens_per_second": value, "rates": [value]}


def test_others_are_compared_with_vllm_plain_and_with_the_best_of_vllms():
    """At each load another depth may be best; a load that failed or that vLLM was not measured with is left out."""
    results = {
        "vllm": {"plain": {"1": rated(100.0), "8": rated(800.0)}, "engine plain": {"max_num_seqs": 128}},
        "vllm-spec": {"K=2": {"1": rated(150.0), "8": rated(700.0)}, "K=5": {"1": rated(200.0), "8": {"error": "..."}}},
        "vllm-ngram": {"K=3": {"1": rated(160.0), "8": rated(750.0)}},
        "own": {"plain": {"1": rated(110.0), "8": rated(840.0)}, "async": {"1": rated(300.0), "64": rated(9.0)}},
    }
    header, one, eight = table.summary(results)
    assert header == ("SESSIONS", "VLLM", "ITS DRAFTS", "BEST", "own plain TO BOTH", "own async TO BOTH")
    assert one == ("1", 100.0, 200.0, "draft model K=5", "1.10 0.55", "3.00 1.50")
    assert eight == ("8", 800.0, 750.0, "n-grams K=3", "1.05 1.05", "")
    assert table.summary({"own": results["own"]}) == []


def test_a_pair_that_is_not_there_is_made(tmp_path, monkeypatch):
    """In the shapes asked for; one that is there is left alone."""
    commands = []
    status = [0]
    run = lambda command, check: commands.append(command) or SimpleNamespace(returncode=status[0])  # noqa: E731
    monkeypatch.setattr(contest, "subprocess", SimpleNamespace(run=run))
    shapes = {"target": "big", "draft": "small", "draft_shape": "vocab=9"}
    contest._build(tmp_path / "pair", "cpu", shapes)
    (command,) = commands
    assert command[2:5] == ["specq", "models", "inflate"]
    assert command[-6:] == ["--target", "big", "--draft", "small", "--draft-shape", "vocab=9"]
    contest._build(tmp_path / "other", "cpu", {"model": "smollm2", "parallel": "", "heads": ("a", "b")})
    assert commands.pop()[-6:] == ["--model", "smollm2", "--heads", "a", "--heads", "b"]
    (tmp_path / "pair" / "draft").mkdir(parents=True)
    (tmp_path / "pair" / "draft" / "config.json").touch()
    contest._build(tmp_path / "pair", "cpu", shapes)
    assert len(commands) == 1
    status[0] = 2
    with pytest.raises(ConfigError, match="unfit could not be made"):
        contest._build(tmp_path / "unfit", "cpu", shapes)


def test_a_child_that_fails_is_an_error_with_what_it_said():
    with pytest.raises(EngineError, match=r"(?s)vllm ended with status 1.*TypeError"):
        vllm.measure_in_child(WORK, colour="red")


def test_a_child_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE_S", 0.01)
    with pytest.raises(EngineError, match=r"no result within 0\.01 s"):
        vllm.measure_in_child(WORK)


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
