"""Suffix trees: they count what a search counts; C does what the reference does, to the last bit; bugs planted in C are seen."""

from __future__ import annotations

import ctypes
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.proposers.suffix import DEPTH, MOST_NODES, draft, make_tree
from specq.proposers.suffix.compiled import SOURCE, Compiled, kernels, with_signatures
from specq.proposers.suffix.reference import DOUBTS, TRUSTED, Reference
from specq.runtime.compiler import built

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=3)


def tree_of(texts: list[list[int]], tree: Any = None) -> Any:
    """Return a tree of texts, of which all but the last have ended."""
    tree = Reference() if tree is None else tree
    for i, text in enumerate(texts):
        if i:
            tree.end_text()
        tree.extend(text)
    return tree


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8))
def test_contexts_are_what_a_search_finds(texts: list[list[int]], tail: list[int]) -> None:
    """How often each token followed the last ones, for each number of them that something followed, where that is spelled out."""
    matches = {context.depth: dict(context.followers()) for context in tree_of(texts).matches(tail)}
    for length in range(1, len(tail) + 1):
        end = tail[len(tail) - length :]
        found = Counter(
            text[i + length] for text in texts for i in range(len(text) - length) if text[i : i + length] == end
        )
        assert (matches.get(length, {}) == found) or (length > 1 and sum(found.values()) == 1 and length in matches)
        if not found:
            return


def test_the_longest_match_counts_most_and_then_how_often() -> None:
    """Three places follow (1, 2); the one before which 9 stands, too, agrees longest."""
    text = [9, 1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2, 5, 9, 1, 2]
    assert draft([tree_of([text])], text, 9, most_depth=1, fan_out=9).token_ids[:2] == [3, 4]


def test_a_text_that_repeats_goes_on_with_itself() -> None:
    """A draft may be longer than what stands in the text."""
    text = [1, 2, 3, 1, 2]
    assert draft([tree_of([text])], text, 8).token_ids == [3, 1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_said_of_what_was_never_seen() -> None:
    """Neither of an empty text, nor of a new token; nor does one text go on with the next."""
    for texts, tail in (([[]], []), ([[1, 2, 3]], [1, 2, 3]), ([[1]], [2]), ([[1, 2], [3, 4]], [2])):
        assert draft([tree_of(texts)], tail, 4).token_ids == []


def test_of_two_texts_the_first_counts_first_where_both_match_as_long() -> None:
    """A session's own text is given first."""
    own, other = tree_of([[7, 1, 2, 3, 8, 1, 2]]), tree_of([[1, 2, 4]])
    assert draft([own, other], [8, 1, 2], 2, most_depth=1, fan_out=2).token_ids == [3, 4]
    assert draft([other, own], [8, 1, 2], 2, most_depth=1, fan_out=2).token_ids == [4, 3]


def test_limits_of_a_draft_are_kept() -> None:
    """Nodes, depth, children, least probability; and whatever is asked for, there are no more nodes than there is room for."""
    random = Random(3)
    text = [random.randrange(3) for _ in range(300)]
    tree = tree_of([text], make_tree())
    assert len(draft([tree], text, 1000, fan_out=9).token_ids) == MOST_NODES
    found = draft([tree], text, 40, most_depth=3, fan_out=2, floor=0.05)
    reach, depths = list[float](), list[int]()
    for parent, prob in zip(found.parents, found.probs, strict=True):
        reach.append(prob * (reach[parent] if parent >= 0 else 1.0))
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert min(reach) >= 0.05
    assert max(depths) <= 3
    assert max(Counter(found.parents).values()) <= 2


def test_one_follower_that_was_seen_once_is_trusted_as_the_table_says() -> None:
    """By length of match."""
    for length in (1, 2, 5, 12):
        text = [*range(10, 10 + length), 3, 4, *range(10, 10 + length)]
        (prob,) = draft([tree_of([text])], text, 1).probs
        assert prob >= TRUSTED[length] - 1e-9
    assert len(DOUBTS) == len(TRUSTED) == DEPTH + 1


# --- the same in C --------------------------------------------------------------------------------------------------------


def play(random: Random, library: ctypes.CDLL | None) -> None:
    """Let two texts grow in both forms, and compare what is drafted."""
    assert library is not None
    own, others = ([Compiled(library), Reference()] for _ in range(2))
    size = random.choice([2, 3, 6])
    for _ in range(random.randint(0, 3)):
        text = [random.randrange(size) for _ in range(random.randint(0, 60))]
        for tree in others:
            tree.extend(text)
            tree.end_text()
    text = []
    for _ in range(random.randint(1, 6)):
        more = [random.randrange(size) for _ in range(random.choice([0, 1, 12, 40]))]
        more += text[: random.choice([0, 0, 20])]  # longer than a sequence that is counted
        text += more
        limits = random.choice([1, 8, 20]), random.choice([1, 4, 16]), random.choice([1, 3]), random.choice([0.0, 0.05])
        found = []
        for mine, other in zip(own, others, strict=True):
            mine.extend(more)
            trees: Any = [mine, other]
            found.append((mine.num_nodes, other.num_nodes, mine.num_tokens, *mine.draft(trees, text[-DEPTH:], *limits)))
        assert found[0] == found[1]


def play_all(library: ctypes.CDLL | None) -> None:
    for seed in range(150):
        play(Random(seed), library)


@needs_compiler
def test_the_compiled_tree_is_the_reference() -> None:
    """After random texts, with random limits."""
    play_all(kernels())


BUGS = {
    "c->count++, c->at = at;": "c->count++;",
    "if (depth + 1 < DEPTH) {": "if (depth + 2 < DEPTH) {",
    "to_front(t, child);\n    }": "}",
    "left *= 1 - trust;": "left *= 1 - trust / 2;",
    "t->num_active = 0;\n    return 0;": "return 0;",
    "if (lengths[k] >= length && ": "if (lengths[k] > length && ",
    "c->first_child == NONE && follows != NONE": "c->first_child == NONE",
}


@needs_compiler
@pytest.mark.parametrize("right", BUGS)
def test_a_bug_in_c_is_seen(right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One change of the kernel at a time."""
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    source = SOURCE.read_text()
    assert right in source
    wrong = tmp_path / "kernels" / "suffix.c"
    wrong.parent.mkdir()
    wrong.write_text(source.replace(right, BUGS[right]))
    library = with_signatures(ctypes.CDLL(str(built(wrong, COMPILER or ""))))
    with pytest.raises(AssertionError):
        play_all(library)


@needs_compiler
def test_a_tree_gives_its_memory_back() -> None:
    """When it is forgotten."""
    freed: list[int] = []

    class Watched:
        def __init__(self, library: ctypes.CDLL) -> None:
            self.suffix_new, self.suffix_free = library.suffix_new, freed.append

    library = kernels()
    assert library is not None
    address = Compiled(Watched(library)).address  # type: ignore[arg-type]
    assert freed == [address]
    library.suffix_free(address)
