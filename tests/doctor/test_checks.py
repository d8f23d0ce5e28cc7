"""What is found of an installation and a pair of models, sound and not."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specq.config import BrokerConfig, ClientConfig, Config
from specq.doctor import installation, neighbours, pair
from specq.doctor.checks import NOTE, OK, WRONG, Check, is_sound
from specq.doctor.examination import quiet
from specq.drafting.block.network import load_block
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.head_kinds import kind_of
from specq.drafting.medusa.network import load_heads
from specq.models import resolve_model
from specq.protocol import BLOCK, EAGLE, MEDUSA, ConfigError
from specq.runtime import usage as measured_usage
from specq.runtime.usage import Usage
from specq.testing.checkpoints import make_checkpoint, save_random
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_draft import PARALLEL, make_draft
from specq.testing.checkpoints_eagle import change_head, eagle_shape_of, make_eagle
from specq.testing.checkpoints_gguf import MADE, write_gguf
from specq.testing.checkpoints_heads import make_heads, make_published
from specq.testing.checkpoints_mtp import QWEN, add_mtp
from tests.devices import HAS_CUDA
from tests.each import each

TINY = Path(resolve_model("tiny", "target"))
HIDDEN, VOCAB = 256, 4096  # of tiny's target
OTHER_DRAFT = resolve_model("smollm2", "draft")  # which is bundled, and of another vocabulary


def statuses(checks) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_only_what_is_wrong_counts():
    assert is_sound([Check("a", OK, ""), Check("b", NOTE, "")])
    assert not is_sound([Check("a", OK, ""), Check("b", WRONG, "")])


# --- the installation -------------------------------------------------------------------------------------------------


def test_kernels_are_built_and_loaded_or_it_is_said_why_not(monkeypatch, tmp_path):
    check = installation.compiled_kernels()
    assert (check.status, check.found[:11]) == (OK, "5 built by ")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda _name: None)
        check = installation.compiled_kernels()
        assert (check.status, check.advice) == (WRONG, "install gcc or clang")
        assert "5 of 5 are missing" in check.found
        assert "several times slower" in check.found
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path))
    monkeypatch.setattr("specq.runtime.compiler.FLAGS", ("--no-such-flag",))
    check = installation.compiled_kernels()
    assert (check.status, "no-such-flag" in check.found, "SPECQ_CACHE" in check.advice) == (WRONG, True, True)


def test_something_must_be_there_to_run_models():
    assert installation.packages({"python": "3.11", "torch": "2", "vllm": None}).status == OK
    check = installation.packages({"python": "3.11", "torch": None, "vllm": None})
    assert (check.status, check.advice) == (NOTE, "for other models and GPUs: pip install 'specq[torch]'")


def test_a_lone_core_and_a_gpu_that_torch_does_not_see_are_noted():
    assert [installation.cores(count, "a cpu").status for count in (1, 2)] == [NOTE, OK]
    names = ["NVIDIA H200"]
    assert installation.accelerator([], has_cuda=False).status == OK
    assert installation.accelerator(names, has_cuda=True).status == OK
    assert installation.accelerator(names, has_cuda=False).status == NOTE


def test_directories_must_be_writable(tmp_path):
    assert installation.writable("cache", tmp_path / "new").status == OK
    (tmp_path / "file").write_text("")
    check = installation.writable("cache", tmp_path / "file" / "cache")
    assert check.status == WRONG
    assert "SPECQ_CACHE" in check.advice


def test_a_port_that_somebody_else_has_is_wrong(free_address, monkeypatch):
    config = replace(Config(), broker=BrokerConfig(bind=free_address))
    assert [check.status for check in installation.broker_port(config)] == [OK]
    with socket.create_server(("127.0.0.1", int(free_address.rpartition(":")[2]))):
        (check,) = installation.broker_port(config)
    assert check.status == WRONG
    assert "--broker" in check.advice
    for is_taken, status in ((False, OK), (True, NOTE)):
        assert installation.http_port("tcp://127.0.0.1:8000", is_taken=is_taken).status == status
    monkeypatch.setattr(installation, "_is_taken", lambda _bind: True)
    monkeypatch.setattr(installation, "_workers_of", lambda *_: [{"role": "target", "name": "t"}])
    (check,) = installation.broker_port(Config())
    assert check.found.endswith("with 1 worker")


def test_a_broker_that_is_there_is_well(free_address, spawn):
    spawn("broker", "--bind", free_address, "--journal", "none")
    config = replace(Config(), broker=BrokerConfig(bind=free_address))
    while not installation.listens(free_address):
        pass  # the test's own time limit ends this
    (check,) = installation.broker_port(config)
    assert check.status == OK
    assert "0 workers" in check.found


@each("which", ["here", "named"])
def test_who_drafts_for_whom_is_said(which, monkeypatch):
    """Of the broker at the address of `specq up`, and of one that commands were told to use. By the jobs of now, and by
    what was accepted since a draft worker registered; one that drafts for nobody is noted."""
    busy = {
        "role": "draft", "name": "d1", "registered_s_ago": 20.0, "drafts_for": {"t2": 3},
        "metrics": {"accepted_for": {"t1": 500, "t2": 10}},
    }  # fmt: skip
    idle = {"role": "draft", "name": "d2", "registered_s_ago": 0.0, "metrics": {}}
    monkeypatch.setattr(installation, "_is_taken", lambda _bind: True)
    asked = []
    monkeypatch.setattr(
        installation, "_workers_of", lambda address, _keys: asked.append(address) or [{"role": "target"}, busy, idle]
    )
    named = replace(Config(), client=ClientConfig(broker="tcp://127.0.0.1:6000"))
    if which == "named":
        broker, first, second = installation.broker_of_clients(named)
        assert asked == ["tcp://127.0.0.1:6000"]
    else:
        assert not [*installation.broker_of_clients(Config())]
        broker, first, second = installation.broker_port(named)
        assert asked == ["tcp://127.0.0.1:5750"]
    assert "with 3 workers" in broker.found
    assert "t1: 0 jobs, 25.0 accepted tokens/s; t2: 3 jobs, 0.5 accepted tokens/s" in first.found
    assert (first.status, second.status) == (OK, NOTE)
    assert "d2 drafts for nobody" in second.found


def test_a_named_broker_that_does_not_reply_is_noted(free_address):
    (check,) = installation.broker_of_clients(replace(Config(), client=ClientConfig(broker=free_address)))
    assert check.status == NOTE
    assert free_address in check.found


def test_a_machine_that_is_busy_is_noted():
    """By what steps took, and by what other processes used of the processors, which steps need not show."""
    assert [quiet(factor, 0.0, 2).status for factor in (1.0, 1.4, 1.6)] == [OK, OK, NOTE]
    assert [quiet(factor, 0.0, 2).status for factor in (0.7, 0.6)] == [OK, NOTE]
    assert [quiet(1.07, used, 2).status for used in (None, 0.1, 0.5, 2.0)] == [OK, OK, NOTE, NOTE]
    assert "other processes used 1.6 of 2 processors" in quiet(1.07, 1.62, 2).found
    assert "used 1.0 of 1 processor" in quiet(1.0, 1.0, 1).found
    assert quiet(0.8, None, 2).found == "steps took 0.8 times as long in the runs as alone before"
    calm, busy = quiet(1.0, 0.0, 2, "1 broker"), quiet(1.0, 1.0, 2, "1 broker")
    assert (calm.status, busy.status) == (OK, NOTE)
    assert "specq is already running here (1 broker)" in calm.found
    assert "stop the specq that is running here" in busy.advice


# --- other processes --------------------------------------------------------------------------------------------------

STAT = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {} 0 0 500 7 0 0 0 0 0\ncpu1 100 0 0 900 0 0 0 {} 0 0\nintr 5\n"


def test_what_others_used_leaves_out_our_own(tmp_path, monkeypatch):
    """Of two processors this process used a half, children that have ended the other half of one, and others half of
    one, with what the host of a virtual machine took."""
    clock = SimpleNamespace(perf_counter=iter([10.0, 20.0]).__next__, process_time=iter([1.0, 6.0]).__next__)
    times = iter([(1.0, 0.0, 2.0, 1.0, 10.0), (6.0, 0.0, 5.0, 3.0, 20.0)])
    monkeypatch.setattr(measured_usage, "time", clock)
    monkeypatch.setattr(os, "times", times.__next__)
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(STAT.format(0, 0))
    before = neighbours.usage([0, 1], tmp_path)
    (tmp_path / "stat").write_text(STAT.format(10 * ticks, 5 * ticks))
    assert neighbours.used_by_others(before, neighbours.usage([0, 1], tmp_path), 2) == pytest.approx(0.5)
    before, after = Usage(10.0, {"client": 1.0}, 20.0), Usage(20.0, {"client": 2.0}, 51.0)
    assert neighbours.used_by_others(before, after, 2) == 2.0, "no more than there are"


def test_without_such_a_count_the_load_stands_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0))
    (tmp_path / "stat").write_text(STAT.format(0, 0))
    for unknown in (neighbours.usage([0, 7], tmp_path), neighbours.usage([0], tmp_path / "nowhere")):
        assert unknown is None
        assert neighbours.used_by_others(unknown, unknown, 2, neighbours.load_average()) == 1.5
        assert neighbours.used_by_others(unknown, unknown, 1, neighbours.load_average()) == 1.0
        assert neighbours.used_by_others(unknown, unknown, 1) is None


def test_what_runs_here_is_counted_by_role(tmp_path):
    """By the command lines of processes."""
    commands = [
        *(
            "/usr/bin/python3 /opt/bin/specq broker",
            "specq worker --role target",
            "python -m specq worker --role draft",
        ),
        *("python -m specq doctor", "vi /home/specq", "ls worker", "sh"),
    ]
    for number, command in enumerate(commands, 4_000_000):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (tmp_path / "4000009").mkdir()  # has just ended
    assert neighbours.running(tmp_path) == "1 broker, 2 workers"
    assert neighbours.running(tmp_path / "nowhere") == ""


# --- the pair ---------------------------------------------------------------------------------------------------------


def test_the_bundled_pair_fits():
    found = pair.look("tiny", "tiny", 10**11)
    assert statuses(found.checks) == dict.fromkeys(("target", "draft model", "ends", "tokenizer", "room"), OK)
    (ends,) = [check.found for check in found.checks if check.name == "ends"]
    assert ends == "<|im_end|> 2 (generation_config.json), <|endoftext|> 0 (generation_config.json)"


def test_a_draft_model_of_another_vocabulary_is_wrong_and_none_is_noted():
    (wrong,) = [check for check in pair.look("tiny", OTHER_DRAFT, 10**11).checks if check.status == WRONG]
    assert wrong.name == "tokenizer"
    assert "49152 tokens" in wrong.found
    assert "4096 tokens" in wrong.found
    assert statuses(pair.look("tiny", "", 10**11).checks)["draft model"] == NOTE


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    """A GGUF file with random values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MADE)).save_pretrained(source)
    return write_gguf(source, tmp_path / "model.gguf")


def wrong_target(model: object) -> str:
    """Return what is said of a model that cannot be a target."""
    found = pair.look(str(model), "", 10**11)
    check, *_ = found.checks
    assert (found.target, check.name, check.status) == (None, "target", WRONG)
    return check.found


def test_a_gguf_file_that_is_cut_short_is_wrong(gguf_file):
    assert pair.look(str(gguf_file), "", 10**11).target is not None
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: len(data) // 2])
    assert "is cut" in wrong_target(gguf_file)


def test_a_directory_without_weights_is_wrong_and_a_hub_name_that_is_not_here_is_not_fetched(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, tmp_path)
    assert "has no weights" in wrong_target(tmp_path)
    assert "specq models pull nobody/has-this-model" in wrong_target("nobody/has-this-model")


def test_a_parallel_draft_model_is_recognised(tmp_path):
    assert pair.find("tiny", "draft").num_places == 1
    assert pair.find(str(make_draft(tmp_path / "draft", PARALLEL)), "draft").num_places == PARALLEL.num_places


# --- heads ------------------------------------------------------------------------------------------------------------


def checked(heads: Path) -> Check:
    """Return what is said of heads for `tiny`."""
    found = [check for check in pair.look("tiny", "", 10**11, heads=str(heads)).checks if check.name == "heads"]
    assert len(found) == 1
    return found[0]


def test_matching_heads_are_distinguished_by_kind(tmp_path):
    check = checked(make_published(tmp_path / "medusa", HIDDEN, VOCAB, heads=3))
    assert (check.status, check.found.partition(",")[0]) == (OK, "3 Medusa heads")
    check = checked(make_eagle(tmp_path / "eagle", eagle_shape_of(HIDDEN, VOCAB, 40, layers=(1, 5, 8))))
    assert check.status == OK
    assert check.found.startswith("an EAGLE-3 head on layers 1, 5, 8, ")
    check = checked(make_block(tmp_path / "block", block_shape_of(HIDDEN, VOCAB, (1, 5))))
    assert check.status == OK
    assert check.found.startswith("a block drafter of 4 tokens on layers 1, 5, ")


def test_an_mtp_layer_is_told(tmp_path):
    """Without a size, because its file is the target's."""
    target = str(add_mtp(make_checkpoint("llama", tmp_path), QWEN))
    found = [check for check in pair.look(target, "", 10**11, heads=target).checks if check.name == "heads"]
    assert [(check.status, check.found) for check in found] == [(OK, f"an MTP layer of the target itself at {target}")]


def test_heads_that_do_not_fit_are_wrong_with_the_reason_of_the_start(tmp_path):
    """Hidden size, vocabulary, tokenizer, layers, number format, and no heads at all."""
    target, info = str(TINY), pair.find("tiny", "target").info
    eagle = partial(eagle_shape_of, layers=(0, 1, 2))
    wrong = {
        "hidden states of size 64": make_published(tmp_path / "a", 64, VOCAB),
        "output 99 tokens": make_published(tmp_path / "b", HIDDEN, 99),
        "trained for another tokenizer": make_heads(tmp_path / "c", HIDDEN, tokenizer=(VOCAB, "f" * 64)),
        "states of size 32": make_eagle(tmp_path / "d", eagle(32, VOCAB, 40)),
        "a vocabulary of 99 tokens": make_eagle(tmp_path / "e", eagle(HIDDEN, 99, 40)),
        "the target has only layers": make_eagle(tmp_path / "f", eagle_shape_of(HIDDEN, VOCAB, 40, layers=(1, 5, 30))),
        "and should be float32": make_eagle(tmp_path / "g", eagle(HIDDEN, VOCAB, 40)),
        "block drafter reads the hidden states": make_block(tmp_path / "h", block_shape_of(HIDDEN, VOCAB, (1, 30))),
    }
    change_head(wrong["and should be float32"], {"norm.weight": torch.ones(HIDDEN, dtype=torch.float64)})
    for said, heads in wrong.items():
        load = {EAGLE: load_eagle, BLOCK: load_block, MEDUSA: load_heads}[kind_of(heads).source]
        with pytest.raises(ConfigError, match=said) as at_start:
            load(str(heads), target, info)
        check = checked(heads)
        assert (check.status, check.found) == (WRONG, str(at_start.value))
    assert "no directory of heads" in checked(tmp_path / "nothing").found


def test_memory_that_does_not_suffice_is_wrong_and_little_is_noted():
    target = pair.find("tiny", "target")
    needed = target.peak_bytes
    found = [pair.room([target], int(times * needed)).status for times in (0.9, 1.1, 1.5)]
    assert found == [WRONG, NOTE, OK]
    assert pair.room([target, target], int(1.5 * needed)).status == WRONG
    assert pair.room([target], None).status == NOTE
    for free, of_gpu, status in ((1, 10**11, OK), (10**11, 10**6, WRONG)):  # on a GPU, its own counts
        assert statuses(pair.look("tiny", "tiny", free_bytes=free, gpu_bytes=of_gpu).checks)["room"] == status


def test_a_draft_model_as_large_as_the_target_is_noted():
    target = pair.find("tiny", "target")
    small = replace(target, info=replace(target.info, max_length=100))
    assert statuses(pair.fitting(target, small)) == {"tokenizer": OK, "contexts": NOTE, "sizes": NOTE}


def test_a_tokens_kv():
    said = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    assert pair.slot_bytes(said) == 2 * 3 * 2 * 16 * 4
    assert pair.slot_bytes(said | {"head_dim": 32}) == 2 * 3 * 2 * 32 * 4
    assert pair.slot_bytes({}) == 0
    assert pair.slot_bytes({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}) == 2 * 2 * 64 * 4


@pytest.mark.skipif(HAS_CUDA, reason="memory of a GPU differs")
def test_the_kv_that_is_reckoned_with_is_what_an_engine_takes():
    from specq.engines import ENGINES

    target = pair.find("tiny", "target")
    engine = ENGINES.resolve("torch").make(str(target.path), device="cpu")
    assert engine.info.kv_slots * target.slot_bytes == target.kv_bytes
    assert engine.info.tokenizer_hash == target.info.tokenizer_hash
    assert engine.info.max_length == target.info.max_length


def test_a_model_that_is_not_here_is_fetched_only_where_there_may_be_one():
    """`specq models pull` refuses an unknown name without a slash, so no message recommends it for one."""
    for name, said in (
        ("nope", "^'nope' is neither a name from `specq models` nor a path; a hub name has a slash"),
        ("no/pe", "^no/pe is not on this machine; fetch it: specq models pull no/pe"),
    ):
        with pytest.raises(ConfigError, match=said):
            pair.find(name, "target")


def test_the_arithmetic_of_a_quantised_file_is_noted_with_what_it_needs(tmp_path):
    """The default changed the text. Exact arithmetic is not noted, and needs more memory."""
    path = write_gguf(save_random(tmp_path / "m", {"model_type": "llama", **MADE}), tmp_path / "model.gguf")
    found = {name: pair.look(str(path), "", None, arithmetic=name) for name in ("auto", "exact")}
    assert statuses(found["auto"].checks)["arithmetic"] == NOTE
    assert "arithmetic" not in statuses(found["exact"].checks)
    assert found["auto"].target.peak_bytes < found["exact"].target.peak_bytes
