"""Which draft model a GGUF file gets if the user names none: beside it, of the known ones, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specq.checkpoints import read_gguf, weight_bytes
from specq.config.sections import NO_MODEL, Config, DraftConfig, TargetConfig, UpConfig
from specq.doctor import Question, examine
from specq.engines import read_info
from specq.models import KnownModel
from specq.models.draft_choice import DraftChoice, choose_draft
from specq.processes.deployment import Hardware, check_can_start, notes, placed
from specq.processes.up import members
from specq.protocol import fits
from specq.testing.checkpoints import save_random
from specq.testing.checkpoints_draft import MADE as DRAFT_SHAPE
from specq.testing.checkpoints_draft import make_draft
from specq.testing.checkpoints_gguf import MADE, Q, sentencepiece_keys, write_gguf
from tests.each import each

LAPTOP = Hardware((0, 1))
SPM = sentencepiece_keys(352)
NONE = "no model with its tokenizer and at most 50% of its size is beside it or in `specq models`"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """GGUF files: targets with two tokenizers, and files of other sizes, tokenizers, types and kinds."""
    home = tmp_path_factory.mktemp("made")
    for layers in (1, 2, 8):
        save_random(home / str(layers), {"model_type": "llama", **MADE, "num_hidden_layers": layers})
    write_gguf(home / "8", home / "target.gguf", linear=Q.F32)
    write_gguf(home / "8", home / "pieces.gguf", linear=Q.F32, metadata=SPM)
    write_gguf(home / "8", home / "large.gguf", linear=Q.F16)
    write_gguf(home / "2", home / "small.gguf")
    write_gguf(home / "1", home / "smaller.gguf")
    write_gguf(home / "1", home / "other.gguf", metadata=SPM)
    write_gguf(home / "1", home / "adapter.gguf", metadata={"general.type": "adapter"})
    write_gguf(home / "1", home / "strange.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    (home / "cut.gguf").write_bytes((home / "smaller.gguf").read_bytes()[:5000])
    (home / "no.gguf").write_bytes(b"GGUF")
    return home


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Put files into a directory; return the path of the first. No model has a name, unless a test adds it."""
    monkeypatch.setattr("specq.models.draft_choice.known_models", list)

    def put(target: str, *others: str) -> Path:
        for name in (target, *others):
            shutil.copy(made / f"{name}.gguf", tmp_path)
        return tmp_path / f"{target}.gguf"

    return put


@each(
    ("target", "others", "chosen"),
    [
        ("target", (), ""),
        ("target", ("small",), "small"),
        ("target", ("small", "smaller", "large"), "smaller"),
        ("target", ("large",), ""),
        ("target", ("other", "pieces"), ""),
        ("pieces", ("other", "small"), "other"),
        ("target", ("adapter", "strange", "cut", "no"), ""),
        ("target", ("adapter", "strange", "cut", "no", "small"), "small"),
    ],
)
def test_the_smallest_file_beside_it_with_its_tokenizer_is_chosen(made, tmp_path_factory, target, others, chosen):
    """At most half as large; what cannot be loaded is passed over."""
    place = tmp_path_factory.mktemp("row")
    for name in (target, *others):
        shutil.copy(made / f"{name}.gguf", place)
    found = choose_draft(str(place / f"{target}.gguf"))
    if not chosen:
        assert found == DraftChoice("", NONE)
        return
    path = place / f"{chosen}.gguf"
    size = weight_bytes(path) / 1e6
    assert found.model == str(path)
    assert found.reason == f"the smallest GGUF file beside it ({size:.0f} MB) with the tokenizer of {target}.gguf"
    assert fits(read_info(path), read_info(place / f"{target}.gguf"))


def test_a_model_in_parts_counts_as_a_whole(folder, made, tmp_path):
    target = folder("target")
    write_gguf(made / "2", tmp_path / "draft.gguf", tensors_each=3)
    write_gguf(made / "8", tmp_path / "big.gguf", linear=Q.F16, tensors_each=3)
    assert Path(choose_draft(str(target)).model).name == "draft-00001-of-00007.gguf"
    first = next(tmp_path.glob("big-00001-*"))
    assert choose_draft(str(first)).model == choose_draft(str(target)).model, "its own parts are no drafts"


def test_a_known_model_is_next(folder, made, tmp_path, monkeypatch):
    """A bundled drafter that was made for this tokenizer; not one of another, or that says nothing of it."""
    target = folder("target")
    info = read_info(target)
    shape = replace(DRAFT_SHAPE, vocab_size=352, num_tokens=info.num_tokens, tokenizer_hash=info.tokenizer_hash)
    homes = {"mine": shape, "longer": replace(shape, num_tokens=info.num_tokens + 1), "another": DRAFT_SHAPE}
    known = []
    for size, name in enumerate(("another", "longer", "mine"), 1):
        home = make_draft(tmp_path / name, homes[name])
        known.append(KnownModel(str(home), "draft", home, size * 1000, "", "bundled"))
    known += [KnownModel("mine-parallel", "draft", tmp_path / "mine", 1, "", "")]
    known += [KnownModel("pulled", "target", None, 1, "", ""), KnownModel("there", "target", made / "8", 1, "", "")]
    monkeypatch.setattr("specq.models.draft_choice.known_models", lambda: known)
    reason = "the smallest of `specq models` (0 MB) with the tokenizer of target.gguf"
    assert choose_draft(str(target)) == DraftChoice(str(tmp_path / "mine"), reason)
    folder("target", "small")
    assert Path(choose_draft(str(target)).model).name == "small.gguf", "a file beside it comes first"


@each("name", ["tiny", "/own", "someone/model", "./nosuch.gguf"])
def test_other_targets_get_their_own_or_none(name):
    assert choose_draft(name) == DraftChoice("tiny" if name == "tiny" else "")


def test_the_choice_drafts_in_the_verifier_and_is_said(folder, tmp_path):
    target, draft = folder("target", "small"), str(tmp_path / "small.gguf")
    config = Config(target=TargetConfig(model=str(target)))
    size = weight_bytes(Path(draft)) / 1e6
    check_can_start(config, LAPTOP)
    assert placed(config, LAPTOP).target.draft_model == draft
    assert members(config)[1].about == f"{target}, drafted for by {draft}"
    (said,) = notes(config, LAPTOP)
    why = f"the smallest GGUF file beside it ({size:.0f} MB) with the tokenizer of target.gguf"
    assert said == f"draft model: {draft}, {why} (another: --draft-model; none: --draft-model none)"


@each(
    ("changes", "expected"),
    [
        ({"draft": DraftConfig(model=NO_MODEL)}, ("", "", 0)),
        ({"draft": DraftConfig(model="tiny")}, ("tiny", "tiny", 0)),
        ({"up": UpConfig(drafters=0)}, ("", "", 0)),
        ({"draft": DraftConfig(proposer="ngram")}, ("", "", 2)),
        ({"draft": DraftConfig(proposer="vllm")}, ("", "", 0)),
    ],
)
def test_what_the_user_sets_is_done(made, changes, expected):
    config = Config(target=TargetConfig(model=str(made / "target.gguf")), **changes)
    chosen = placed(config, LAPTOP)
    assert (chosen.target.draft_model, chosen.draft.model, chosen.up.drafters) == expected
    assert not [line for line in notes(config, LAPTOP) if line.startswith("draft model:")]


def test_a_draft_model_of_the_targets_section_needs_no_search(made):
    config = Config(target=TargetConfig(model=str(made / "target.gguf"), draft_model="/own"))
    assert (placed(config, LAPTOP).target.draft_model, notes(config, LAPTOP)) == ("/own", [])


def test_none_is_said_with_the_reason(folder):
    target = folder("target")
    assert notes(Config(target=TargetConfig(model=str(target))), LAPTOP) == [
        f"{target} has no draft model ({NONE}): no drafters start, and the verifier drafts from repeated text"
    ]


def test_a_file_that_appears_later_is_found(folder):
    target = folder("target")
    assert choose_draft(str(target)).model == ""
    folder("target", "small")
    assert Path(choose_draft(str(target)).model).name == "small.gguf"


def test_the_doctor_predicts_the_choice(folder):
    target = folder("target", "small")
    checks = {
        model: {check.name: check.found for check in examine(question(target, model), print).checks}
        for model in ("", NO_MODEL)
    }
    assert "the smallest GGUF file beside it" in checks[""]["draft choice"]
    assert "small.gguf" in checks[""]["draft model"]
    assert ("draft choice" in checks[NO_MODEL], checks[NO_MODEL]["draft model"]) == (False, f"none for {target}")


def question(target: Path, draft: str) -> Question:
    return Question(Config(target=TargetConfig(model=str(target)), draft=DraftConfig(model=draft)), (1,), is_quick=True)


def test_padding_is_no_difference(folder, made, tmp_path):
    """Sizes of one family have vocabularies that are padded to other lengths."""
    target = folder("target")
    keys = {f"tokenizer.ggml.{key}": read_gguf(target).metadata[f"tokenizer.ggml.{key}"] for key in ("tokens",)}
    kinds = read_gguf(target).metadata["tokenizer.ggml.token_type"]
    size = kinds.index(5)
    shorter = {"tokenizer.ggml.tokens": keys["tokenizer.ggml.tokens"][: size + 1]}
    write_gguf(made / "1", tmp_path / "draft.gguf", metadata=shorter | {"tokenizer.ggml.token_type": kinds[: size + 1]})
    assert Path(choose_draft(str(target)).model).name == "draft.gguf"
