"""All kinds of draft models in real processes: the text stays the target's with good, useless or foreign drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq import Client
from specq.client.result import Result
from specq.engines import describe, read_info
from specq.models import resolve_model
from specq.processes.up import Group
from specq.protocol import EngineError
from specq.testing.checkpoints import make_renumbered
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_eagle import change_head, eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import make_heads
from specq.training.draft import save_draft
from specq.training.parallel import open_draft
from tests.deploying import QUESTION, READY_S, connected, group_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MOST_TRIES = 50
SMALL = resolve_model("tiny", "draft")  # a target like any other, of two layers
# In rounds, ahead of the verdicts, and in a shape of the job's own.
WAYS = ({"mode": "sync"}, {"mode": "async"}, {"mode": "sync", "tree": [[0, 0, 0], [0, 1], [1, 0], [2]]})
EACH_PLACE = pytest.mark.parametrize("colocated", [False, True], ids=["worker", "colocated"])


def start(model: str, *, colocated: bool = False, vocabulary: str = "same", **draft: Any) -> Group:
    """Start a verifier that uses every draft, and a model that drafts: in a worker, or in the verifier's process."""
    here = {"draft_model": model, "vocabulary": vocabulary} if colocated else {}
    return group_of(
        up={"drafters": 0 if colocated else 1},
        target={"drafts": "always", "prompt_lookup": "none"} | here,
        draft={"model": model, "vocabulary": vocabulary} | draft,
    )


def check_refused(group: Group, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One of the processes ends before it serves, and says why."""
    with group, pytest.raises(EngineError, match="status 2"):
        group.wait_ready(READY_S)
    assert reason in capfd.readouterr().err


def drafted_well(results: list[Result]) -> bool:
    """Return whether drafts were accepted, and others rejected."""
    accepted, drafted = (sum(result.stats[name] for result in results) for name in ("accepted_tokens", "draft_tokens"))
    return 0 < accepted < drafted


def until(is_enough: Callable[[list[Result]], bool], generate: Callable[[], Result]) -> list[Result]:
    """Return results until they are enough: draft workers of a busy machine are often late."""
    found = [generate()]
    while not is_enough(found) and len(found) < MOST_TRIES:
        found.append(generate())
    return found


def check_texts(client: Client, *, colocated: bool) -> None:
    """Greedy and sampled, texts are plain decoding's, and drafts are accepted. A worker that runs ahead may be late
    each time: `tiny` waits for no draft."""
    for temperature in (0.0, 0.8):
        job = {"messages": QUESTION, "max_tokens": 100, "ignore_eos": True, "temperature": temperature, "seed": 3}
        plain = client.generate(mode="plain", **job)
        for way in WAYS:
            is_enough = drafted_well if colocated or way["mode"] == "sync" else bool
            results = until(is_enough, lambda way=way, job=job: client.generate(**way, **job))
            assert {tuple(result.token_ids) for result in results} == {tuple(plain.token_ids)}
            assert is_enough(results), way


def check_point_masses(client: Client) -> None:
    """With `probabilistic` drafts are accepted, too, and a text of 40 tokens comes to its end."""
    job = {"messages": QUESTION, "max_tokens": 40, "temperature": 0.8, "strategy": "probabilistic"}
    results = until(drafted_well, lambda: client.generate(mode="sync", **job))
    assert drafted_well(results)
    assert len(results[-1].token_ids) == 40 or results[-1].finish_reason == "stop"


# --- a parallel draft model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled draft model with random masks: its first place is as good as ever, the others are nonsense."""
    target, first = (Path(resolve_model("tiny", role)) for role in ("target", "draft"))
    draft = open_draft(first, target, 4, torch.device("cpu"), lambda: np.zeros(0, np.int32), 4096)
    torch.nn.init.normal_(draft.network.model.embed_tokens.masks, generator=torch.Generator().manual_seed(0))
    directory = tmp_path_factory.mktemp("parallel")
    save_draft(draft.network, draft.shape, draft.token_ids, directory)
    return str(directory)


@EACH_PLACE
def test_a_parallel_model(parallel: str, colocated: bool) -> None:
    """Under `probabilistic` its nodes are point masses."""
    with connected(start(parallel, colocated=colocated)) as client:
        check_texts(client, colocated=colocated)
        check_point_masses(client)


def test_a_parallel_model_for_another_tokenizer_is_refused(
    parallel: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in Path(parallel).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    said = config.read_text().split('"tokenizer_hash": "')
    config.write_text(said[0] + '"tokenizer_hash": "' + "0" * 64 + said[1][64:])
    check_refused(start(str(tmp_path), colocated=True), "so its tokens cannot be compared", capfd)


# --- a small target with Medusa heads ---------------------------------------------------------------------------------


def medusa(directory: Path, hidden: int) -> Group:
    """Start a small target with random heads: what they guess is nonsense, and what it says itself is as good as
    ever."""
    info = describe(
        Path(SMALL), engine="torch", name="small", dtype="float32", vocab_size=4096, max_length=2048, kv_slots=0
    )
    heads = make_heads(directory, hidden, tokenizer=(info.num_tokens, info.tokenizer_hash))
    return start(SMALL, heads=str(heads))


def test_a_small_target_with_heads(tmp_path: Path) -> None:
    with connected(medusa(tmp_path / "heads", 192)) as client:
        check_texts(client, colocated=False)
        check_point_masses(client)


def test_heads_of_another_model_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(medusa(tmp_path / "heads", 256), "take hidden states of size 256; those of", capfd)


# --- heads that read hidden states, in a draft worker ----------------------------------------------------------------


def head(proposer: str, directory: Path, *options: str, **changes: int) -> Group:
    """Start a head in a worker, which is sure of what it says, so that it is sent."""
    info = read_info(Path(resolve_model("tiny", "target")))
    about = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    if proposer == "eagle3":
        eagle = eagle_shape_of(256, info.vocab_size, 300, **about)
        heads = make_eagle(directory / "heads", eagle, embedding=False)
    else:
        heads = make_block(directory / "heads", block_shape_of(256, info.vocab_size, (1, 5, 8), **about), range(300))
    if changes:
        change_head(heads, **changes)
    return start(str(heads), proposer=proposer, engine_options=options)


@pytest.mark.parametrize(("proposer", "form"), [("eagle3", "bf16"), ("eagle3", "int8"), ("block", "bf16")])
def test_a_head_in_a_worker(tmp_path: Path, proposer: str, form: str) -> None:
    """What is drafted of the target's hidden states reaches it. Some drafts are verified before it is known that they
    are always wrong."""
    num_drafted = 0
    with connected(head(proposer, tmp_path, f"activations={form}", "window=32")) as client:
        for temperature in (0.0, 0.8):
            job = {"messages": QUESTION, "max_tokens": 60, "ignore_eos": True, "temperature": temperature, "seed": 3}
            plain = client.generate(mode="plain", **job)
            for way in WAYS:
                result = client.generate(**way, **job)
                assert result.token_ids == plain.token_ids
                num_drafted += result.stats["draft_tokens"]
    assert num_drafted > 0


def test_a_head_for_another_target_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    group = head("eagle3", tmp_path, target_hidden_size=512)
    check_refused(group, "this head takes hidden states of size 512; those of tiny have 256", capfd)


# --- another vocabulary -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", ["shared", "text"])
@EACH_PLACE
def test_a_model_of_another_vocabulary(vocabulary: str, colocated: bool, tmp_path: Path) -> None:
    draft = str(make_renumbered(Path(SMALL), tmp_path))
    with connected(start(draft, colocated=colocated, vocabulary=vocabulary)) as client:
        for temperature in (0.0, 0.8):
            plain, drafted = (
                client.generate(messages=QUESTION, max_tokens=40, temperature=temperature, seed=3, mode=mode)
                for mode in ("plain", "sync")
            )
            assert drafted.token_ids == plain.token_ids
            if temperature == 0.0 or vocabulary == "shared":
                assert drafted.stats["accepted_tokens"] > 8
