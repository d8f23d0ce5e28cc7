"""`specq bench gpu --only far`: draft workers on cores of this machine, behind a delay proxy, in turns with plain
decoding."""

import json
import shutil
from itertools import pairwise

import pytest
from click.testing import CliRunner

from bench.end_to_end import far, serving
from bench.end_to_end.streams import Stream, StreamLoad
from bench.end_to_end.workload import Workload
from specq.cli import main
from specq.models import resolve_model

WORK = Workload("pair", "cpu", [1, 8], 4, 2, [[5, 6], [7, 8]])


def test_each_draft_worker_has_a_core_of_its_own():
    """As on a machine with 16 cores: two for the verifier, one for the broker, one for the bench and its proxy."""
    cores = far.Cores.of(tuple(range(16)), 12)
    assert cores == far.Cores((0, 1), (2,), tuple(range(4, 16)))
    config = cores.given(serving.verifier_config(WORK, ""))
    assert (config.target.cores, config.broker.cores) == ((0, 1), (2,))


@pytest.mark.parametrize(("here", "drafters"), [(1, 2), (2, 2), (3, 1), (4, 12), (6, 12)])
def test_where_there_are_few_cores_they_are_shared(here, drafters):
    cores = far.Cores.of(tuple(range(here)), drafters)
    assert cores.verifier
    assert cores.broker
    assert len(cores.drafters) == drafters
    assert set(cores.verifier + cores.broker + cores.drafters) <= set(range(here))
    if here > 1:
        assert not set(cores.verifier) & set(cores.drafters)


def test_far_draft_workers_are_small_and_find_the_broker_at_the_proxy():
    """Each on one core of its own, on the CPU, not niced."""
    config = serving.verifier_config(WORK, "")
    settings = far.FarSettings(2, "tiny", (20.0,))
    first, second = far._members(config, "tcp://127.0.0.1:9", settings, far.Cores((0,), (0,), (1, 2)))
    given = dict(pairwise(first.arguments))
    assert {name: given[f"--{name}"] for name in ("broker", "model", "device", "cores", "nice")} == {
        "broker": "tcp://127.0.0.1:9", "model": "tiny", "device": "cpu", "cores": "1", "nice": "0",
    }  # fmt: skip
    assert dict(pairwise(second.arguments))["--cores"] == "2"
    assert first.about == config.broker.bind


def test_turns_alternate_and_a_ratio_is_of_two_turns_of_one_repetition(monkeypatch):
    """What draft workers made counts against the seconds of the turns with drafts alone."""
    order = []

    class Completer:
        def __init__(self, _client, _load, _work, mode):
            self._mode, self.results = mode, []

        def complete(self, prompts, num_tokens):
            order.append((self._mode, num_tokens))
            return [Stream([1] * num_tokens)] * len(prompts)

    class Service:
        def __init__(self):
            self._nodes = iter((100, 500))

        def counts(self):
            return {}, {"draft_nodes": next(self._nodes)}

    monkeypatch.setattr(far, "Completer", Completer)
    monkeypatch.setattr(far, "speculation", lambda _: {"stale": 1, "drafted": 4})
    found = far._in_turns(None, Service(), WORK, StreamLoad(1), 0.0)
    assert [mode for mode, _ in order[2:]] == ["plain", "async", "async", "plain"]
    assert found["async"]["stale_share"] == 0.25
    assert found["async"]["drafted_per_second"] > 0
    ratios = [ours / plain for ours, plain in zip(*(found[mode]["rates"] for mode in ("async", "plain")), strict=True)]
    assert found["async"]["ratios"] == pytest.approx(ratios, rel=1e-2)
    low, high = found["async"]["interval"]
    assert low <= found["async"]["to_plain"] <= high
    assert "to_plain" not in found["plain"]


def test_a_turn_goes_on_until_its_seconds_are_over(monkeypatch):
    """A turn repeats all of its jobs. A fast contestant completes more, and is measured as well as a slow one."""
    now = iter((0.0, 0.4, 0.8, 1.2))
    monkeypatch.setattr(far.time, "monotonic", lambda: next(now))

    class Completer:
        def complete(self, prompts, num_tokens):
            return [Stream([1] * num_tokens)] * len(prompts)

    assert len(far._turn(Completer(), [[1], [2]], 3, 1.0)) == 3 * 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_far_draft_workers_on_the_cpu(tmp_path):
    """Two delays on one verifier, the draft workers new at each; sampling, too."""
    out, pair = tmp_path / "gpu.json", tmp_path / "pair"
    for role in ("target", "draft"):
        shutil.copytree(resolve_model("tiny", role), pair / role)
    options = [
        "--device",
        "cpu",
        "--pair",
        pair,
        "--output-len",
        8,
        "--repeats",
        1,
        "--settle-s",
        0,
        "--out",
        out,
        "--far-drafters",
        2,
    ]
    loads = ["--sessions", 2, "--temperature", 0, "--temperature", 0.8, "--sampled-sessions", 1]
    asked = ["--only", "far", "--rtt-ms", 0, "--rtt-ms", 20, *loads, *options]
    outcome = CliRunner().invoke(main, ["bench", "gpu", *map(str, asked)])
    assert outcome.exit_code == 0, outcome.output
    results = json.loads(out.read_text())["results"]
    assert list(results["far"]) == ["plain 0 ms", "async 0 ms", "plain 20 ms", "async 20 ms"], results
    assert list(results["far"]["async 20 ms"]) == ["2", "1 T=0.8"]
    assert "drafted_per_second" in results["far"]["async 20 ms"]["2"]
    assert results["far"]["plain 20 ms"]["2"]["mean_accepted_length"] == 1.0
