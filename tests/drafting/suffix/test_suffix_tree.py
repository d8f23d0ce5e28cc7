"""Suffix trees: they count what a search counts; C does what the reference does, to the last bit; bugs planted in C are
seen."""

from __future__ import annotations

import ctypes
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.drafting.suffix import (
    DEPTH,
    MOST_NODES,
    NO_TEXT,
    TOO_OLD,
    CompiledTexts,
    ReferenceTexts,
    Requests,
    SuffixTexts,
    TextDrafts,
    draft,
    make_tree,
)
from specq.drafting.suffix.compiled import SOURCE, CompiledMatcher, kernels, with_signatures
from specq.drafting.suffix.reference import DOUBTS, TRUSTED, ReferenceMatcher
from specq.runtime.compiler import built

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=3)


def tree_of(texts: list[list[int]], tree: Any = None) -> Any:
    """Return a tree of texts. All but the last have ended."""
    tree = ReferenceMatcher() if tree is None else tree
    for i, text in enumerate(texts):
        if i:
            tree.end_text()
        tree.extend(text)
    return tree


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8))
def test_contexts_are_what_a_search_finds(texts: list[list[int]], tail: list[int]) -> None:
    """How often each token followed the last ones, for each number of them that something followed, where that is
    spelled out."""
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


def test_unseen_text_has_no_continuation() -> None:
    """Neither of an empty text, nor of a new token; nor does one text go on with the next."""
    for texts, tail in (([[]], []), ([[1, 2, 3]], [1, 2, 3]), ([[1]], [2]), ([[1, 2], [3, 4]], [2])):
        assert draft([tree_of(texts)], tail, 4).token_ids == []


def test_of_two_texts_the_first_counts_first_where_both_match_as_long() -> None:
    """A session's own text is given first."""
    own, other = tree_of([[7, 1, 2, 3, 8, 1, 2]]), tree_of([[1, 2, 4]])
    assert draft([own, other], [8, 1, 2], 2, most_depth=1, fan_out=2).token_ids == [3, 4]
    assert draft([other, own], [8, 1, 2], 2, most_depth=1, fan_out=2).token_ids == [4, 3]


def test_limits_of_a_draft_are_kept() -> None:
    """Nodes, depth, children, minimum probability. The number of nodes never exceeds the room."""
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


# --- the same in C
# --------------------------------------------------------------------------------------------------------


def play(random: Random, library: ctypes.CDLL | None) -> None:
    """Let two texts grow in both forms, and compare what is drafted."""
    assert library is not None
    own, others = ([CompiledMatcher(library), ReferenceMatcher()] for _ in range(2))
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


WINDOW = 16
SLOTS = 6


class Sessions:
    """Texts in both forms, which grow, come and go alike; what is drafted for them is compared."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library, self.size = library, size
        self.forms: list[SuffixTexts] = [CompiledTexts(library), ReferenceTexts()]
        self.texts: dict[int, list[int]] = {}  # by slot
        self.lengths, self.limits = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
        self.recent = np.zeros((SLOTS, WINDOW), np.int32)
        self.others: list[tuple[Any, Any]] = []

    def do(self, what: str, *arguments: Any) -> None:
        found = [getattr(form, what)(*arguments) for form in self.forms]
        assert found[0] == found[1]

    def open(self, random: Random) -> None:
        slot = random.randrange(SLOTS)
        self.do("close", slot)
        self.texts[slot] = []
        self.limits[slot] = random.choice([5, 40, 1000])
        self.commit(slot, random)

    def commit(self, slot: int, random: Random) -> None:
        """A text is never longer than its limit."""
        text = self.texts[slot]
        new = [random.randrange(self.size) for _ in range(random.choice([1, 1, 2, 7, 30]))]
        new = (new + text[: random.choice([0, 0, 20])])[: self.limits[slot] - len(text)]
        for token in new:
            self.recent[slot, len(text) % WINDOW] = token
            text.append(token)
        self.lengths[slot] = len(text)

    def end(self, random: Random) -> None:
        """A text, or half of one, is what others are drafted from, too."""
        trees: tuple[Any, Any] = CompiledMatcher(self.library), ReferenceMatcher()
        cut = random.choice([5, 1000])
        for text in random.sample(list(self.texts.values()), min(len(self.texts), 2)):
            for tree in trees:
                tree.extend(text[:cut])
                tree.end_text()
        self.others.append(trees)

    def draft(self, random: Random) -> None:
        """For some of the texts, in any order."""
        slots = random.sample(sorted(self.texts), random.randint(1, len(self.texts)))
        limits = random.choice([1, 3]), random.choice([0.0, 0.05, 0.4])
        chosen = [random.sample(self.others, min(len(self.others), random.randint(0, 3))) for _ in range(2)]
        groups = np.array([random.choice([-1, 0, 1]) for _ in slots], np.int32) if self.others else None
        for _ in range(4):
            found = [
                form.draft(
                    Requests(
                        *(np.array(slots, np.intp), self.lengths, self.limits, self.recent, groups),
                        [[tree[which] for tree in group] for group in chosen],
                        *limits,
                    )
                )
                for which, form in enumerate(self.forms)
            ]
            assert [column.tolist() for column in found[0]] == [column.tolist() for column in found[1]]
            if isinstance(found[0], TextDrafts):
                self.check(slots, found[0])
                return
            for slot, reason in zip(slots, found[0].reasons.tolist(), strict=True):
                self.make_ready(slot, reason, random)
        raise AssertionError("the texts are never ready")

    def make_ready(self, slot: int, reason: int, random: Random) -> None:
        if reason == NO_TEXT and random.random() < 0.1:
            self.do("leave", slot)
        elif reason == NO_TEXT:
            self.do("open", slot, random.choice([1, 8, MOST_NODES]), random.choice([1, 4, 16]))
        elif reason == TOO_OLD:
            self.do("extend", slot, self.texts[slot])

    def check(self, slots: list[int], drafts: TextDrafts) -> None:
        """Texts that are left alone have no drafts; none goes further than its text may, less the token that
        follows."""
        ends = np.cumsum(drafts.sizes).tolist()
        for slot, size, end in zip(slots, drafts.sizes.tolist(), ends, strict=True):
            depths = list[int]()
            for parent in drafts.parents[end - size : end].tolist():
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            assert not size or slot in self.forms[0]
            assert max(depths, default=0) <= max(self.limits[slot] - self.lengths[slot] - 1, 0)


def play_sessions(random: Random, library: ctypes.CDLL | None) -> None:
    """Let sessions come, grow, be drafted for, and go."""
    assert library is not None
    sessions = Sessions(library, random.choice([2, 3, 6]))
    sessions.open(random)
    for _ in range(random.randint(1, 30)):
        what = random.random()
        if what < 0.1:
            sessions.open(random)
        elif what < 0.2:
            sessions.end(random)
        elif what < 0.6:
            sessions.commit(random.choice(sorted(sessions.texts)), random)
        else:
            sessions.draft(random)


@needs_compiler
@given(st.randoms(use_true_random=True))
def test_texts_in_c_are_the_reference(random: Random) -> None:
    """Of sessions that come and go: in one call for all, from their own text and from others."""
    play_sessions(random, kernels())


def play_all(library: ctypes.CDLL | None) -> None:
    for seed in range(150):
        play(Random(seed), library)
    for seed in range(150):
        play_sessions(Random(seed), library)


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
    "if (ends->lengths[k] >= length && ": "if (ends->lengths[k] > length && ",
    "if (!above && d->num_begun == ends->num_trees) break;": "if (!above) break;",
    "d->num_contexts < CONTEXTS) {": "d->num_contexts < CONTEXTS / 4) {",
    "if (newest == NONE || ": "if (newest == NONE || t->nodes[newest].count == 2 || ",
    "if (length - t->num_tokens > window) return TOO_OLD;": "if (length - t->num_tokens >= window) return TOO_OLD;",
    "recent[t->num_tokens % window]": "recent[(t->num_tokens + 1) % window]",
    "recent + slot * window": "recent",
    "others[groups[i]]": "others[0]",
    "limits[slot] - lengths[slot] - 1": "limits[slot] - lengths[slot]",
    "(Context){own, own->active[i], NONE, own->depths[i]}": "(Context){own, own->active[i], NONE, 1}",
    "if (text.tree && !text.most_nodes) continue;": "",
    "            are_ready = 0;\n": "",
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
    address = CompiledMatcher(Watched(library)).address  # type: ignore[arg-type]
    assert freed == [address]
    library.suffix_free(address)
