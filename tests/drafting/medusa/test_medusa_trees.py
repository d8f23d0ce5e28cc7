"""The trees that Medusa heads draft: as published, as a job asks for, or best first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.config import read_tree
from specq.drafting.rank_trees import RankTree, checked_tree, tree_for
from specq.drafting.trees import source as module
from specq.drafting.trees.ranked import Ranked, of_shape
from specq.protocol import (
    ConfigError,
    Speculation,
)
from specq.testing.conformance.sources import PROMPT
from specq.testing.toy_drafters import ToyHeads
from tests.drafting.medusa.serving import ASYNC, CHOICES, serving

# --- trees
# ----------------------------------------------------------------------------------------------------------------


def paths_of(tree: RankTree | None, wanted: Any = None) -> list[tuple[int, ...]]:
    """The paths of the wanted nodes of a tree."""
    assert tree is not None
    paths: list[tuple[int, ...]] = []
    for rank, parent in zip(tree.ranks.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return [path for i, path in enumerate(paths) if wanted is None or wanted[i]]


def test_choices_load_as_they_are_published(tmp_path: Path) -> None:
    """As tuples or lists, in the option or in a file; what is missing above a path comes with it."""
    (tmp_path / "choices.txt").write_text(CHOICES.replace("(", "[").replace(")", "]"))
    for said in (CHOICES, str(tmp_path / "choices.txt")):
        tree = tree_for(Speculation.from_dict({"tree": read_tree(said)}), 4)
        assert set(paths_of(tree)) == {
            *((0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("[[0]", "is neither a list of paths"),
        ("nowhere.txt", "is neither a list of paths .* nor a file"),
        ("[[0],[0,0,0,0,0]]", r"the path \[0, 0, 0, 0, 0\], which is 5 deep; there are 4 heads"),
        ("[[99]]", "tree is .*, but must be at most 1024 non-empty paths of ranks"),
        ("[5]", "tree is"),
        ("[[]]", "tree is"),
    ],
)
def test_a_tree_that_makes_no_sense_is_refused(said: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        checked_tree(said, 4, "there are 4 heads")


def test_a_job_gets_the_tree_that_it_asks_for() -> None:
    """The shapes of jobs, down to the last head; without one the configured tree, else best first."""
    default = ((0, 0), (1,))
    assert paths_of(tree_for(ASYNC, 4, default)) == [(0,), (1,), (0, 0)]
    assert paths_of(tree_for(Speculation(max_depth=1), 4, default)) == [(0,), (1,)]
    assert paths_of(tree_for(Speculation(num_candidates=2, max_depth=2), 4, default)) == [(0,), (1,), (0, 0), (1, 0)]
    assert max(map(len, paths_of(tree_for(Speculation(tree=((0,) * 7,)), 4)))) == 4
    assert tree_for(ASYNC, 3) is None


def test_what_heads_do_not_know_is_not_drafted() -> None:
    """Fewer tokens than the tree has ranks, and tokens that the sampler rules out."""
    tree = tree_for(Speculation(tree=((0, 0), (1, 1), (2,))), 2)
    scores = np.log(np.array([[[0.6, 0.4], [1.0, 0.0]]], np.float32), out=np.full((1, 2, 2), -np.inf, np.float32),
    where=np.array([[[True, True], [True, False]]]))  # fmt: skip
    assert tree is not None
    grown = of_shape(Ranked(np.zeros(scores.shape, np.int32), scores), tree, 2)
    assert paths_of(tree, np.isfinite(grown.reach[0])) == [(0,), (1,), (0, 0), (1, 0)]


def test_few_sessions_get_large_trees_and_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total number of nodes is limited."""
    sizes: dict[int, int] = {}
    for count in (1, 8, 20):
        started, source = serving(ToyHeads(PROMPT, wrong_every=1, blind=True))
        for i in range(count):
            started.open(i, seed=i)
        for _ in range(count):
            started.turn()
        monkeypatch.setattr(module, "FLOOR", 1e-9)
        sessions = list(started.verifier.sessions.values())
        source.begin(sessions, None, 0.0)  # type: ignore[arg-type]
        (batch,) = source.collect(sessions, None, lambda: 0.0)  # type: ignore[arg-type]
        sizes[count] = int(np.max(batch.sizes))
    assert sizes == {1: 64, 8: 32, 20: 12}
