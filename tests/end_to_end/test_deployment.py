"""Who drafts where, and on which cores, when `specq up` is left to choose."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from specq.config.sections import AUTO_DRAFTERS, NO_MODEL, Config, DraftConfig, ServeConfig, TargetConfig, UpConfig
from specq.models.draft_choice import DraftChoice
from specq.processes.deployment import (
    CoreShares,
    Hardware,
    check_can_start,
    divide_cores,
    models_of,
    notes,
    placed,
)
from specq.processes.up import members, pages
from specq.protocol import ConfigError
from specq.testing.checkpoints import make_checkpoint
from specq.testing.checkpoints_block import as_block_of_speculators, block_shape_of, make_block
from specq.testing.checkpoints_eagle import as_speculators, eagle_shape_of, make_eagle, make_parallel
from specq.testing.checkpoints_mtp import QWEN, add_mtp
from specq.testing.secured import make_all
from tests.each import each

LAPTOP, WORKSTATION, GPU_BOX = Hardware((0, 1)), Hardware(tuple(range(8))), Hardware(tuple(range(16)), has_gpu=True)


@each(
    ("num_cores", "targets", "drafters", "expected"),
    [
        (1, 1, 2, CoreShares((0,), ((0,),), ((0,), (0,)))),
        (2, 1, 2, CoreShares((1,), ((0,),), ((1,), (1,)))),
        (2, 2, 1, CoreShares((1,), ((0,), (0,)), ((1,),))),
        (2, 1, 0, CoreShares((1,), ((0,),), ())),
        (4, 1, 2, CoreShares((3,), ((0, 1, 2),), ((3,), (3,)))),
        (8, 1, 2, CoreShares((7,), ((0, 1, 2, 3, 4, 5),), ((6,), (7,)))),
        (8, 2, 1, CoreShares((7,), ((0, 2, 4, 6), (1, 3, 5)), ((7,),))),
    ],
)
def test_divide_cores(num_cores, targets, drafters, expected):
    assert expected == divide_cores(num_cores, targets, drafters)


@each(("num_cores", "targets", "drafters"), product(range(1, 20), [1, 2, 5], [0, 1, 2, 7]))
def test_targets_get_most_cores_and_each_process_at_least_one(num_cores, targets, drafters):
    """Each process has a core that exists; from two cores on no target shares one with broker or drafters."""
    shares = divide_cores(num_cores, targets, drafters)
    large = {core for share in shares.targets for core in share}
    small = {*shares.broker, *(core for share in shares.drafters for core in share)}

    assert (len(shares.targets), len(shares.drafters)) == (targets, drafters)
    assert all([*shares.targets, *shares.drafters, shares.broker])
    assert large | small <= set(range(num_cores))
    assert num_cores == 1 or not large & small
    assert num_cores == 1 or targets < num_cores // 2 or len(small) <= max(1, num_cores // 4)


@pytest.fixture
def with_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.models.find_packaged", lambda name: (Path("/there.gguf"), "fetched"))


def who_drafts(config: Config, machine: Hardware) -> tuple[str, int]:
    """Return the draft model in the verifier's process, and how many workers draft."""
    chosen = placed(config, machine)
    return chosen.target.draft_model, chosen.up.drafters


# --- who drafts where -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_smollm2")
@each(
    ("machine", "expected"),
    [
        (Hardware((0,)), ("smollm2", 0)),
        (LAPTOP, ("smollm2", 0)),
        (Hardware((2, 3, 4, 5)), ("smollm2", 1)),
        (WORKSTATION, ("smollm2", 2)),
        (GPU_BOX, ("smollm2", 0)),
    ],
)
def test_the_draft_model_is_beside_the_verifier_and_workers_on_cores_to_spare(
    machine: Hardware, expected: tuple[str, int]
) -> None:
    assert who_drafts(Config(), machine) == expected
    assert notes(Config(), machine) == []


@pytest.mark.usefixtures("with_smollm2")
@each(
    ("machine", "config", "expected"),
    [
        (machine, config, expected)
        for machine in [LAPTOP, WORKSTATION, GPU_BOX]
        for (config, expected) in [
            (Config(up=UpConfig(drafters=0)), ("", 0)),
            (Config(up=UpConfig(drafters=3)), ("", 3)),
            (Config(up=UpConfig(drafters=0), target=TargetConfig(draft_model="/own")), ("/own", 0)),
            (Config(draft=DraftConfig(width=4)), ("", 2)),
            (Config(draft=DraftConfig(proposer="ngram")), ("", 2)),
            (Config(target=TargetConfig(engine="vllm")), ("", 2)),
            (Config(draft=DraftConfig(proposer="ngram", own=(("ngram", ("longest=4",)),))), ("", 2)),
            (Config(draft=DraftConfig(own=(("draft-model", ("rows=4",)),))), ("", 2)),
        ]
    ],
)
def test_what_is_said_is_done(machine: Hardware, config: Config, expected: tuple[str, int]) -> None:
    assert who_drafts(config, machine) == expected


@pytest.mark.usefixtures("with_smollm2")
def test_a_draft_model_of_the_targets_own_section_stays_where_it_was_put() -> None:
    config = Config(target=TargetConfig(model="/own", draft_model="/small"), draft=DraftConfig(model="/smaller"))
    assert who_drafts(config, LAPTOP) == ("/small", 0)
    assert placed(config, WORKSTATION).draft.model == "/smaller"


@pytest.mark.usefixtures("with_smollm2")
@each(("drafters", "reason", "said"), [(AUTO_DRAFTERS, "", ""), (2, "none found", " (none found)")])
def test_without_a_draft_model_lookups_draft_and_that_is_said(
    drafters: int, reason: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specq.processes.deployment.choose_draft", lambda model: DraftChoice("", reason))
    config = Config(up=UpConfig(drafters=drafters))
    assert who_drafts(config, LAPTOP) == ("", 0)
    assert notes(config, LAPTOP) == [
        f"smollm2 has no draft model{said}: no drafters start, and the verifier drafts from repeated text"
    ]
    none = Config(up=UpConfig(drafters=0))
    assert notes(none, LAPTOP) == []


def test_a_target_of_ones_own_gets_no_drafters_of_another() -> None:
    assert who_drafts(Config(target=TargetConfig(model="/own")), WORKSTATION) == ("", 0)


def test_without_smollm2_tiny_is_served_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.models.find_packaged", lambda name: None)
    chosen = placed(Config(), LAPTOP)
    assert (chosen.target.model, chosen.target.draft_model) == ("tiny", "tiny")
    assert notes(Config(), LAPTOP) == [
        "smollm2 is not on this machine (specq models pull smollm2); using the toy model tiny"
    ]
    asked = Config(target=TargetConfig(model="tiny"))
    assert notes(asked, LAPTOP) == []


@pytest.mark.usefixtures("with_smollm2")
@each(
    "config",
    [
        Config(target=TargetConfig(model="tiny", draft_model="/none")),
        Config(target=TargetConfig(model="tiny"), draft=DraftConfig(model="/none"), up=UpConfig(drafters=1)),
        Config(target=TargetConfig(model="tiny"), draft=DraftConfig(heads="/none"), up=UpConfig(drafters=1)),
        Config(target=TargetConfig(model="tiny"), draft=DraftConfig(target="/none"), up=UpConfig(drafters=1)),
    ],
)
def test_models_of_every_process_are_looked_for(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"there is no .* /none"):
        check_can_start(config, LAPTOP)


@each(
    "config",
    [
        Config(target=TargetConfig(model="tiny", heads="smollm2", draft_model="tiny")),
        Config(target=TargetConfig(model="someone/a-model"), draft=DraftConfig(model="someone/smaller")),
        Config(target=TargetConfig(model="tiny"), draft=DraftConfig(model="/none"), up=UpConfig(drafters=0)),
        Config(target=TargetConfig(model="tiny"), draft=DraftConfig(proposer="ngram"), up=UpConfig(drafters=1)),
    ],
)
def test_hub_names_and_unused_models_are_not_checked(config: Config) -> None:
    check_can_start(config, LAPTOP)
    assert "/none" not in [name for name, _ in models_of(placed(config, LAPTOP))]


@pytest.mark.usefixtures("with_smollm2")
@each(
    ("machine", "config", "expected"),
    [
        (machine, config, expected)
        for machine in [LAPTOP, WORKSTATION, GPU_BOX]
        for (config, expected) in [
            (Config(), ("", 0)),
            (Config(target=TargetConfig(draft_model="/small"), draft=DraftConfig(model="/small", width=4)), ("", 0)),
            (Config(draft=DraftConfig(proposer="ngram")), ("", 2)),
            (Config(up=UpConfig(drafters=1)), ("", 1)),
        ]
    ],
)
def test_without_a_draft_model_no_model_drafts_and_no_note_is_printed(
    machine: Hardware, config: Config, expected: tuple[str, int]
) -> None:
    config = replace(config, draft=replace(config.draft, model=NO_MODEL))
    assert who_drafts(config, machine) == expected
    assert not notes(config, machine)


@each(
    ("target", "about"),
    [
        (TargetConfig(model="tiny", heads="smollm2"), "tiny, drafted for by tiny and the heads smollm2"),
        (TargetConfig(model="/own", heads="/heads"), "/own, drafted for by the heads /heads"),
        (TargetConfig(model="/own"), "/own"),
    ],
)
def test_it_is_said_what_drafts_in_a_verifiers_process(target: TargetConfig, about: str) -> None:
    assert members(Config(target=target))[1].about == about


def test_the_progress_option_does_not_request_workers() -> None:
    config = Config(target=TargetConfig(model="tiny"), draft=DraftConfig(progress=True, keys="keys"))
    assert who_drafts(config, LAPTOP) == ("tiny", 0)


@pytest.mark.usefixtures("with_smollm2")
def test_the_table_of_an_unused_proposer_does_not_request_workers() -> None:
    config = Config(draft=DraftConfig(own=(("vllm", ("max_model_len=512",)),)))
    assert who_drafts(config, LAPTOP) == ("smollm2", 0)


@pytest.mark.usefixtures("with_smollm2")
@each(("engine", "draft_model"), [("torch", "smollm2"), ("vllm", "")])
def test_without_a_key_no_draft_worker_starts_and_a_notice_is_printed(
    tmp_path: Path, engine: str, draft_model: str
) -> None:
    """If they were not requested. Otherwise the worker without a key reports the error."""
    keys = make_all(tmp_path / "keys")
    config = Config(target=TargetConfig(engine=engine), draft=DraftConfig(keys=keys))
    for missing in ("laptop", "phone"):
        (tmp_path / "keys" / f"{missing}.secret").unlink(missing_ok=True)

    assert who_drafts(config, WORKSTATION) == (draft_model, 0)
    assert notes(config, WORKSTATION) == [
        (
            f"no draft workers: {keys} contains no secret key of the role draft; "
            f"create one: specq keys {keys} NAME --role draft"
        )
    ]
    assert notes(config, LAPTOP) == ([] if engine == "torch" else notes(config, WORKSTATION))
    asked = replace(config, up=UpConfig(drafters=1))
    assert (placed(asked, WORKSTATION).up.drafters, notes(asked, WORKSTATION)) == (1, [])


@pytest.mark.usefixtures("with_smollm2")
def test_with_a_key_draft_workers_are_placed_as_without_any(tmp_path: Path) -> None:
    config = Config(draft=DraftConfig(keys=f"{make_all(tmp_path / 'keys')}/laptop"))
    assert who_drafts(config, WORKSTATION) == ("smollm2", 2)
    assert notes(config, WORKSTATION) == []


def test_the_verifier_is_started_with_its_draft_model() -> None:
    config = Config(target=TargetConfig(model="tiny"))
    target = members(config)[1]
    assert "--draft-model tiny" in " ".join(target.arguments)
    assert target.about == "tiny, drafted for by tiny"


def test_a_draft_worker_of_another_vocabulary_receives_the_target_name() -> None:
    """Only a worker that needs the target's tokenizer receives it."""
    for vocabulary, told in (("shared", "--vocabulary shared --target tiny"), ("same", "")):
        config = Config(target=TargetConfig(model="tiny"), draft=DraftConfig(vocabulary=vocabulary), up=UpConfig(1, 1))
        draft = " ".join(members(config)[2].arguments)
        assert ("--target" in draft) == bool(told)
        assert told in draft


# --- cores -----------------------------------------------------------------------------------------------------------


@each(
    ("config", "helpers"),
    [
        (Config(up=UpConfig(1, 0)), "--engine-option helper_cores=[7]"),
        (Config(up=UpConfig(1, 1)), "--engine-option helper_cores=[7]"),
        (Config(up=UpConfig(2, 0)), ""),
        (Config(up=UpConfig(1, 0), target=TargetConfig(cores=(3,))), ""),
        (Config(up=UpConfig(1, 0), target=TargetConfig(engine="vllm")), ""),
        (Config(up=UpConfig(1, 0), target=TargetConfig(engine_options=("helper_cores=[4]",))), "helper_cores=[4]"),
    ],
)
def test_the_brokers_core_helps_a_lone_target(config: Config, helpers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.processes.up.this_machine", lambda: Hardware((5, 7)))
    target = " ".join(members(replace(config, draft=DraftConfig(model="/own")))[1].arguments)
    assert helpers in target
    assert target.count("helper_cores") == bool(helpers)


def test_a_single_core_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.processes.up.this_machine", lambda: Hardware((5,)))
    assert "helper_cores" not in " ".join(members(Config(up=UpConfig(1, 0)))[1].arguments)


@each(
    ("serve", "expected"),
    [
        (None, []),
        (ServeConfig(), ["http://127.0.0.1:8000/"]),
        (ServeConfig(bind="tcp://*:9000", insecure=True, tls_cert="c", tls_key="k"), ["https://127.0.0.1:9000/"]),
    ],
)
def test_it_is_said_where_the_page_is(serve: ServeConfig | None, expected: list[str]) -> None:
    config = Config(
        target=TargetConfig(model="tiny"), up=UpConfig(serve=serve is not None), serve=serve or ServeConfig()
    )
    assert pages(members(config), config.serve) == expected


def made_eagle(directory):
    return as_speculators(make_eagle(directory, eagle_shape_of(256, 4096, 30), embedding=False), "tiny")


def made_block(directory):
    shape = block_shape_of(256, 4096, (1, 5), mask_token_id=7, norms_states=False)
    return as_block_of_speculators(make_block(directory, shape), "tiny")


def made_parallel(directory):
    shape = eagle_shape_of(256, 4096, 30, layers=(1, 5, 8), num_layers=2, num_places=4, mask_token_id=7)
    return make_parallel(directory, shape, "tiny")


@pytest.mark.parametrize("made", [made_eagle, made_block, made_parallel])
def test_a_head_of_speculators_names_its_target(tmp_path, made):
    head = made(tmp_path / "head")
    asked = Config(target=TargetConfig(model=str(head)))
    chosen = placed(asked, LAPTOP)
    assert (chosen.target.model, chosen.target.heads) == ("tiny", str(head))
    assert chosen == placed(Config(target=TargetConfig(model="tiny", heads=str(head))), LAPTOP)
    assert notes(asked, LAPTOP) == notes(Config(target=TargetConfig(model="tiny", heads=str(head))), LAPTOP)
    both = Config(target=TargetConfig(model=str(head), heads=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"is a head for tiny .* and target\.heads names others"):
        placed(both, LAPTOP)


def test_a_target_with_an_mtp_layer_drafts_for_itself(tmp_path):
    """If neither heads nor a draft model is named, and the engine returns hidden states."""
    model = str(add_mtp(make_checkpoint("llama", tmp_path / "a"), QWEN))
    plain = str(make_checkpoint("llama", tmp_path / "b"))

    def heads(draft: str = "", **target: str) -> str:
        asked = Config(target=TargetConfig(**{"model": model, **target}), draft=DraftConfig(model=draft))
        return placed(asked, LAPTOP).target.heads

    assert [heads(), heads(draft="none"), heads(heads=model), heads(heads=plain)] == [model, model, model, plain]
    assert [heads(heads="none"), heads(draft="tiny"), heads(engine="vllm"), heads(model=plain)] == [""] * 4
    asked = Config(target=TargetConfig(model=model))
    assert notes(asked, LAPTOP) == [f"{model} drafts for itself, with its MTP layer (none: --heads none)"]
    named = replace(asked, target=replace(asked.target, heads="mtp"))
    assert placed(named).target.heads == model
    vllm = replace(named, target=replace(named.target, engine="vllm"))
    assert placed(vllm).target.heads == "mtp"
    assert check_can_start(asked, LAPTOP) is None
    (said,) = notes(Config(target=TargetConfig(model=model, engine="vllm"), up=UpConfig(drafters=0)), LAPTOP)
    assert said == f"the vllm engine uses the MTP layer of {model} only with --heads mtp"
    assert notes(Config(target=TargetConfig(model=plain, heads=model)), LAPTOP) == []
    assert [heads(heads="mtp"), heads(heads="mtp", engine="vllm"), heads(heads="mtp", model=plain)] == [
        model,
        "mtp",
        "mtp",
    ]
    assert heads(heads="mtp", draft="tiny") == model


def test_a_verifier_knows_whether_its_own_layer_was_asked_for(tmp_path):
    """If not, it also starts without it."""
    model = str(add_mtp(make_checkpoint("llama", tmp_path), QWEN))

    def said(heads: str) -> str:
        _, verifier, *_ = members(Config(target=TargetConfig(model=model, heads=heads)))
        assert verifier.about == f"{model}, drafted for by its own MTP layer"
        return verifier.arguments[verifier.arguments.index("--heads") + 1]

    assert [said(""), said("mtp"), said(model)] == ["mtp", "mtp", model]


def test_a_directory_that_a_model_of_ours_hides_drafts_for_nothing(tmp_path, monkeypatch):
    add_mtp(make_checkpoint("llama", tmp_path / "tiny"), QWEN)
    monkeypatch.chdir(tmp_path)
    assert placed(Config(target=TargetConfig(model="tiny"), draft=DraftConfig(model="none")), LAPTOP).target.heads == ""
