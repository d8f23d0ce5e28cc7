"""vLLM in `specq bench gpu`, with a stand-in for it: how it is loaded, driven and reported. What it measures needs
vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from bench.end_to_end import vllm
from bench.end_to_end.streams import StreamLoad
from bench.end_to_end.workload import Workload

WORK = Workload("pair", "cuda", [2, 256], 3, 1, [[5, 6], [7, 8]])
LENGTH = 3


class Engine:
    """Gives each request a token a step, the last two at once; knows the most requests that were under way."""

    def __init__(self):
        self.under_way, self.most, self.seen = {}, 0, []

    def add_request(self, name, prompt, params):
        self.seen.append((prompt["prompt_token_ids"], params.max_tokens, params.temperature))
        self.under_way[name] = iter([[], [1], [2, 3]])
        self.most = max(self.most, len(self.under_way))

    def step(self):
        outputs = []
        for name, tokens in list(self.under_way.items()):
            new = next(tokens)
            finished = new == [2, 3]
            if finished:
                del self.under_way[name]
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=new)], finished=finished)
            )
        return outputs


class Llm:
    """Refuses asynchronous scheduling on request. Its draft counters grow at each look."""

    made: list[dict]
    refuses = False

    def __init__(self, **arguments):
        Llm.made.append(arguments)
        if Llm.refuses and arguments.get("async_scheduling"):
            raise ValueError("async scheduling is not compatible with it")
        self.llm_engine, self._looks = Engine(), 0

    def get_metrics(self):
        self._looks += 1
        counts = {"num_drafts": 10, "num_accepted_tokens": 15}
        return [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=count * self._looks)
            for name, count in counts.items()
        ]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A module `vllm` with what is used of it."""
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    module.LLM, module.SamplingParams = Llm, SimpleNamespace
    monkeypatch.setattr(Llm, "made", [], raising=False)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def test_as_many_requests_are_under_way_as_there_are_sessions():
    """Texts are in the prompts' order, put together from the new tokens of each step; tokens that come together are one
    arrival."""
    rival = vllm._Vllm(Llm(), WORK)
    streams = rival._complete(StreamLoad(2, 0.8), [[5], [6], [7]], LENGTH)
    assert [stream.token_ids for stream in streams] == [[1, 2, 3]] * 3
    assert [len(stream.arrivals) for stream in streams] == [2, 2, 2]
    assert all(stream.started < stream.arrivals[0] for stream in streams)
    assert rival._engine.most == 2
    assert rival._engine.seen == [([n], LENGTH, 0.8) for n in (5, 6, 7)]


def test_figures_of_a_load_have_the_accepted_length_since_it_was_warm():
    found = vllm._Vllm(Llm(), WORK).measure(StreamLoad(2))
    assert found["mean_accepted_length"] == 2.5
    assert {"tokens_per_second", "first_token_ms", "itl_ms", "itl_p99_ms"} <= set(found)


def test_it_has_seats_for_the_largest_load_and_overlaps_steps():
    """A draft model only where a depth is given."""
    vllm._load(WORK, 0, "async")
    vllm._load(WORK, 5, "async")
    plain, spec = Llm.made
    assert (plain["max_num_seqs"], plain["async_scheduling"]) == (256, True)
    assert "enforce_eager" not in plain
    assert "speculative_config" not in plain
    assert spec["speculative_config"]["num_speculative_tokens"] == 5


def test_it_may_look_for_its_drafts_in_the_text():
    """Then it has no draft model."""
    vllm._load(WORK, 4, "async", "ngram")
    assert Llm.made[0]["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4
    }  # fmt: skip


def test_where_it_refuses_to_overlap_steps_it_is_loaded_without(monkeypatch, capsys):
    monkeypatch.setattr(Llm, "refuses", True)
    vllm._load(WORK, 3, "async")
    assert ["async_scheduling" in arguments for arguments in Llm.made] == [True, False]
    assert "not compatible" in capsys.readouterr().err


def test_scheduling_may_be_left_to_it():
    vllm._load(WORK, 3, "default")
    assert "async_scheduling" not in Llm.made[0]


def test_the_report_says_what_it_ran_with():
    scheduler = SimpleNamespace(async_scheduling=True, max_num_seqs=256, max_num_batched_tokens=8192)
    compilation = SimpleNamespace(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2, 512])
    config = SimpleNamespace(
        scheduler_config=scheduler, compilation_config=compilation, model_config=SimpleNamespace(enforce_eager=False)
    )
    assert vllm._effective(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))) == {
        "async_scheduling": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_sizes": [3, 1, 512],
        "v2_model_runner": None,
        "enforce_eager": False,
    }
