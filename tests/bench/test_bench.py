"""The benchmark's parts that touch the world: data sets, processes, the command, the broker's round trip."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench import deployments, scenario
from bench.deployments import Specq
from bench.scenario import Settings
from bench.stubs import VerdictCounter, draft_frames, encode_key, open_session
from bench.suites.pair import NAMES, default_names, kinds
from bench.suites.roundtrip import roundtrip, roundtrip_table, summarize, verdict_on
from specq.cli import main
from specq.client import Client
from specq.processes import up
from specq.processes.servers import Servers, pair_config
from specq.protocol.errors import ConfigError, EngineError, JobError
from specq.protocol.messages import Draft, Open, Submit, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode
from specq.runtime import log
from specq.runtime.machine import describe
from specq.samples import load_prompts, shipped
from specq.testing.fake_broker import ANSWER_IDS, CODEC, FakeBroker
from specq.testing.secured import make_all
from specq.testing.tokenizer import tokenizer_json
from specq.text.codec import TextCodec

SETTINGS = Settings(datasets=("gsm8k",))


@pytest.fixture
def keys(tmp_path):
    """A directory with one key of each role."""
    directory = make_all(tmp_path / "keys")
    (tmp_path / "keys" / "bob.secret").unlink()  # the second client's
    return directory


# --- prompts ------------------------------------------------------------------------------------------------------


def test_shipped_data_sets():
    """Both samples can be read, through the chat template, and begin where asked."""
    assert shipped() == ["gsm8k", "humaneval"]
    prompts = load_prompts(("gsm8k", "humaneval"), 3, CODEC)
    assert [prompt.dataset for prompt in prompts] == ["gsm8k"] * 3 + ["humaneval"] * 3
    assert prompts[0].id == "gsm8k-test-0000"
    assert CODEC.decode(prompts[0].token_ids, skip_special=False).startswith("<|im_start|>user\nJanet")


def test_any_file(tmp_path):
    """A file may hold prompts, chats or ids; a model without a template gets plain text."""
    path = tmp_path / "own.jsonl"
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}], "id": 7}, {"token_ids": [5]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = load_prompts((str(path),), 10, CODEC)
    assert first.token_ids == second.token_ids == tuple(CODEC.encode_chat([{"role": "user", "content": "a"}]))
    assert (first.dataset, second.id, third.token_ids) == ("own", "7", (5,))
    bare = TextCodec({"tokenizer.json": tokenizer_json()})
    assert load_prompts((str(path),), 1, bare)[0].token_ids == tuple(CODEC.encode("a"))


@pytest.mark.parametrize("text", ["nonsense", '{"id": 3}', '{"messages": [3]}'])
def test_bad_files(tmp_path, text):
    """A line that is not a prompt is named. A missing file is named, too."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n' + text)
    with pytest.raises(ConfigError, match="line 2"):
        load_prompts((str(path),), 10, CODEC)
    with pytest.raises(ConfigError, match="gsm8k"):
        load_prompts(("no-such",), 10, CODEC)


# --- contestants --------------------------------------------------------------------------------------------------


def test_specq_as_a_contestant(tmp_path):
    """Prompts run through the client with the run's settings; order and statistics are kept."""
    with FakeBroker() as broker, Client(broker.address, cache_dir=tmp_path) as client:
        prompts = load_prompts(("gsm8k",), 3, CODEC)
        short = [replace(prompt, token_ids=prompt.token_ids[:9]) for prompt in prompts]
        completions = Specq("specq", client, 2).run(short, replace(SETTINGS, output_len=4))
    assert [completion.token_ids for completion in completions] == [ANSWER_IDS[:4]] * 3
    assert all(completion.stats["rounds"] == 4 and completion.first_token_ms > 0 for completion in completions)


def test_who_takes_part():
    """One plain session is measured beside many, random weights only on request; processes are shared."""
    assert default_names(SETTINGS, random_draft=False) == ("transformers", "assisted", "plain", "lookup", "specq")
    many = replace(SETTINGS, concurrency=16)
    assert default_names(many, random_draft=True) == tuple(name for name in NAMES if name != "lookahead")
    assert kinds(NAMES) == ["alone", "lookahead", "specq", "random"]


def test_a_key_that_is_missing_is_said_before_anything_is_started(keys):
    """Whose, and how to make it; drafters that there are not need none."""
    (Path(keys) / "laptop.secret").unlink()
    Servers(pair_config("tiny", "tiny", 0, keys))
    with pytest.raises(ConfigError, match="of the role draft; create one: specq keys"):
        Servers(pair_config("tiny", "tiny", 1, keys))
    with pytest.raises(ConfigError, match="of the role draft"):
        roundtrip(keys=keys)


@pytest.mark.slow
def test_processes_with_keys(keys):
    """Broker, workers and the measured client have the keys. A client without a key receives no answer."""
    with Servers(pair_config("tiny", "tiny", 1, keys)) as running:
        running.wait_ready()
        assert len(running.client.generate(token_ids=[5, 6], max_tokens=3, ignore_eos=True).token_ids) == 3
        with Client(running.address, timeout_s=0.3) as stranger, pytest.raises(JobError, match="no broker"):
            stranger.status()


def test_processes_that_end_at_once(capfd):
    """A process that cannot start is an error that names it; what it said stands on standard error."""
    with Servers(pair_config("/no/such", "tiny", 0)) as dead, pytest.raises(EngineError, match=r"target-1 .*status 2"):
        dead.wait_ready(60.0)
    assert "/no/such" in capfd.readouterr().err


def test_processes_that_never_get_ready(monkeypatch):
    """Processes that do not get ready are named while they are waited for, then given up, and stopped."""
    waiting, told = Servers(pair_config("tiny", "tiny", 0)), []
    monkeypatch.setattr(up.subprocess, "Popen", _sleeper(up.subprocess.Popen))
    monkeypatch.setattr(log, "EVERY_S", 0.0)
    with waiting, pytest.raises(EngineError, match="not all processes were ready within"):
        waiting.wait_ready(0.1, told.append)
    assert told[0] == "waiting for broker, target-1: 0 s so far"
    assert [process.returncode is not None for process in waiting._group.processes.values()] == [True, True]


def test_drafters_may_find_the_broker_elsewhere():
    """Only drafters get the other address; the broker's journal is in the folder, unless there is none."""
    far = "tcp://127.0.0.1:1"
    config = pair_config("tiny", "tiny", 1)
    broker, target, draft = Servers(config, far)._members("/folder")
    assert [far in member.arguments for member in (broker, target, draft)] == [False, False, True]
    assert config.broker.bind not in draft.arguments
    assert "/folder/journal" in broker.arguments
    without = replace(config, broker=replace(config.broker, journal="none"))
    assert "/folder/journal" not in Servers(without)._members("/folder")[0].arguments


def _sleeper(popen):
    return lambda _, **options: popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--out", ".", "--only", "plain"], "is a directory"),
        (["--out", "x.json", "--only", "nobody"], "nobody"),
        (["--out", "x.json", "--numseqs", "0"], "numseqs"),
        (["--out", "x.json", "--temperature", "-1"], "temperature"),
        (["--out", "x.json", "--dataset", "no-such", "--only", "plain"], "no-such"),
        (["--out", "x.json", "--model", "/no/such", "--only", "plain"], "/no/such"),
    ],
)
def test_bad_options(options, reason):
    """What cannot be measured is said in a line, before anything is started."""
    outcome = CliRunner().invoke(main, ["bench", *options])
    assert outcome.exit_code == 2
    assert reason in outcome.stderr.splitlines()[-1]


def test_the_command(tmp_path, monkeypatch, keys):
    """The table goes to the screen, all figures and where they come from to the file; the processes have the keys."""

    asked = {}

    class Fake(Servers):
        def __enter__(self):
            assert self.keys == keys
            self.broker = FakeBroker().__enter__()
            self.client = Client(self.broker.address, cache_dir=tmp_path)
            return self

        def wait_ready(self, timeout_s=0.0, tell=bool):
            self.client.wait_until_ready()

        def __exit__(self, *_):
            self.client.close()
            heard = [message for message in self.broker.heard if isinstance(message, Submit)]
            asked[self.drafters] = {job.speculation.mode for job in heard}
            self.broker.__exit__()

    path, out = tmp_path / "own.jsonl", tmp_path / "bench.json"
    path.write_text('{"token_ids": [5, 6]}\n' * 3)
    monkeypatch.setattr(deployments, "Servers", Fake)
    monkeypatch.setattr(scenario, "codec_of", lambda _: CODEC)
    names = ["--only", "plain", "--only", "lookup", "--only", "specq"]
    options = ["--dataset", str(path), "--output-len", "6", "--repeats", "2", "--keys", keys, *names, "--out", str(out)]
    outcome = CliRunner().invoke(main, ["bench", *options])
    assert outcome.exit_code == 0, outcome.output
    assert "CONTESTANT" in outcome.stdout
    assert "18 completions compared with plain: 0 differ" in outcome.stdout
    assert asked == {0: {"plain", "async"}, 1: {"async"}}, "plain and lookup differ in the mode, not in the processes"
    report = json.loads(out.read_text())
    result = report["results"]
    assert list(result["contestants"]) == ["plain", "lookup", "specq"]
    own = result["contestants"]["specq"]
    assert (own["num_tokens"], own["speculation"]["rounds"], own["sessions"]) == (36, 24, 1)
    assert own["speculation"]["accepted_lengths"] == [6, 6, 6, 6]
    assert report["settings"]["repeats"] == 2
    assert set(report) == {
        *("suite", "command", "date", "commit", "machine", "versions"),
        *("settings", "figures", "results"),
    }
    assert report["figures"]["specq tokens/s"]["repeats"] == own["tokens_per_second"]["repeats"]


@pytest.mark.parametrize(
    ("module", "command"),
    [(None, "specq"), ("specq.__main__", "specq"), ("bench.journal", "python -m bench.journal")],
)
def test_circumstances(monkeypatch, module, command):
    """A figure says where it comes from."""
    spec = module and ModuleSpec(module, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["program", "--out", "a b"])
    told = describe()
    assert told["machine"]["cores"] >= 1
    assert told["versions"]["pyzmq"]
    assert told["command"] == f"{command} --out 'a b'"


# --- round trips --------------------------------------------------------------------------------------------------


def test_stub_messages():
    """What the stubs send are valid messages of the promised sizes, and positions go on."""
    draft = decode(draft_frames(2**62, 2**40, 0))
    assert isinstance(draft, Draft)
    assert len(draft.token_ids) == 8
    verdicts = VerdictCounter(5, 3, 100)
    first, second = (decode(verdicts.take()) for _ in range(2))
    assert isinstance(first, Verdict)
    assert (first.base_len, second.base_len, len(first.token_ids), int(first.mask.sum())) == (100, 109, 9, 8)
    assert sum(map(len, draft_frames(2**62, 2**40, 0))) <= 200
    assert sum(map(len, VerdictCounter(2**62, 2**40, 1000).take())) <= 200 + 9  # a byte for the origin of each token


def test_the_stub_is_where_a_session_was_opened_last():
    """Both openings of a moved session came over connections of their own. The earlier one arrives last."""
    sessions: dict[bytes, VerdictCounter] = {}
    for epoch, length in ((93, 5), (90, 1)):
        tokens = np.zeros(length, np.int32)
        open_session(
            sessions,
            Open(session_id=7, epoch=epoch, prompt_len=1, tokens_left=99, params=SamplingParams(), token_ids=tokens),
        )
    verdict = decode(sessions[encode_key(7)].take())
    assert isinstance(verdict, Verdict)
    assert (verdict.epoch, verdict.base_len) == (93, 5)


def one(p50: float, rate: float) -> dict[str, float]:
    return {"p50_us": p50, "p99_us": 2 * p50, "rate": rate}


def test_round_trips_are_compared_within_a_repetition():
    """The added time and the ratio are medians of differences and ratios, not of figures of different moments."""
    repeats = [{"direct": one(d, 100.0), "broker": one(d + added, rate)} for d, added, rate in
               ((100, 90, 50), (300, 100, 70), (100, 240, 60))]  # fmt: skip
    result = summarize(repeats)
    assert (result["added_us"], result["rate_ratio"]) == (100.0, 0.6)
    assert result["direct"] == one(100.0, 100.0)
    assert roundtrip_table(result)[1] == ("direct", 100.0, 200.0, 100.0)
    assert [line.count("met") for line in verdict_on(result)[:2]] == [1, 1]
    slow = result | {"added_us": 251.0, "rate_ratio": 0.44}
    assert [line.count("missed") for line in verdict_on(slow)[:2]] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secured", "repeats", "seconds"),
    [(False, 2, 0.1), (True, 1, 0.1), (False, 2, 1.6)],
)
def test_round_trips_through_a_real_broker(keys, secured, repeats, seconds):
    """Broker, stubs and a subscriber as they are measured; with keys each of them needs its own. No draft of
    seconds without a pause is dropped for taking too much of a verifier's time."""
    result = roundtrip(repeats=repeats, count=50, seconds=seconds, keys=keys if secured else "")
    assert result["broker"]["p50_us"] > 0
    assert result["rate_ratio"] > 0
    assert len(result["repeats"]) == repeats
