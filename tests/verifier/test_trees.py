"""The compiled operations on draft trees do what the reference in Python does, to the last bit; bugs planted in C are
seen."""

from __future__ import annotations

import ctypes
import re
import shutil
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol import LEAST_OWN_LANE
from specq.protocol.types import DraftDistribution
from specq.runtime.compiler import built
from specq.verification import NUM_BINS
from specq.verifier.trees import MAX_LIVE_NODES, MAX_TABLE_SIZE, NEXT_IDS, NO_LIMIT, DraftTrees
from specq.verifier.trees.arrays import (
    ALONE,
    COLUMNS,
    COUNTS,
    FIRST_OWN_LANE,
    MAX_LANES,
    NUM_OWN_LANES,
    SOURCE,
    WINDOW,
    CompiledTrees,
    _Struct,
    kernels,
    with_signatures,
)

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
NUM_TOKENS = 4


def test_sizes_in_c_are_those_of_the_arrays():
    """Else C would write into other sessions' places, or beside the arrays."""
    header = SOURCE.with_name("trees.h").read_text()
    expected = {
        "MAX_LIVE": MAX_LIVE_NODES, "MAX_LANES": MAX_LANES, "TABLE": MAX_TABLE_SIZE, "WINDOW": WINDOW, "BINS": NUM_BINS,
        "NUM_COUNTS": len(COUNTS), "FIRST_OWN_LANE": FIRST_OWN_LANE, "OWN_LANES": NUM_OWN_LANES,
    }  # fmt: skip
    found = {name: int(size) for name, size in re.findall(r"\b([A-Z_]+) = (\d+)", header)}
    assert found == expected
    assert FIRST_OWN_LANE <= LEAST_OWN_LANE
    assert FIRST_OWN_LANE + NUM_OWN_LANES == 256


class Both:
    """Two structures, on which the same is done."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self.compiled, self.reference = DraftTrees(), DraftTrees(is_compiled=False)
        if library is not None:
            self.compiled.operations = CompiledTrees(self.compiled, library)
        self.places: list[int] = []  # of open sessions

    def do(self, what: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of both, of the structure or of its operations; their answers must be equal."""
        found, expected = [
            getattr(trees if hasattr(DraftTrees, what) else trees.operations, what)(*arguments, **options)
            for trees in (self.compiled, self.reference)
        ]
        assert_equal(found, expected, what)
        return expected

    def compare(self) -> None:
        """All columns are equal; `mark` is scratch."""
        for name in [name for columns in (*COLUMNS.values(), ALONE) for name in columns if name != "mark"]:
            assert_equal(getattr(self.compiled, name), getattr(self.reference, name), name)
        assert_equal(self.compiled.num_free, self.reference.num_free, "num_free")


def assert_equal(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, what)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, what
        assert found.tobytes() == expected.tobytes(), what
    else:
        assert found == expected, what


def play(both: Both, random: Random, num_events: int) -> None:
    """Do random things, as a verifier, its drafters and hostile ones may."""
    events = [opened, grafted, grafted, grafted, verified, verified, selected, left]
    opened(both, random)
    for _ in range(num_events):
        random.choice(events)(both, random)
        both.compare()


def opened(both: Both, random: Random) -> None:
    context = np.array([random.randrange(NUM_TOKENS) for _ in range(random.choice([1, 3, WINDOW + 5]))], np.int32)
    both.places.append(both.do("open", context, takes_distributions=random.random() < 0.5))


def left(both: Both, random: Random) -> None:
    """A session is closed, or its drafts are forgotten."""
    place = random.choice([*both.places, -1])
    if random.random() < 0.5 and place in both.places and len(both.places) > 1:
        both.places.remove(place)
        both.do("close", place)
    elif place in both.places and random.random() < 0.3:
        both.do("forget", place)


def grafted(both: Both, random: Random) -> None:
    """Some drafts arrive: early, late, twice, out of order, too large, with ids that collide, for sessions that are
    gone."""
    distributions = [
        DraftDistribution(np.arange(NUM_TOKENS, dtype=np.int32), np.ones(NUM_TOKENS, np.uint16)) for _ in range(3)
    ]
    heads, nodes = [], []
    for _ in range(random.randint(1, 3)):
        place = random.choice([*both.places, *both.places, -1, 3])
        length = max(0, int(both.reference.length[place]))
        first = random.choice([NEXT_IDS, NEXT_IDS, random.randint(0, 40), random.randint(0, 40) + MAX_TABLE_SIZE])
        size = random.choice([0, 1, 3, 6, 6, 30]) if random.random() < 0.97 else MAX_LIVE_NODES + 9
        base_len = max(0, length + random.choice([0, 0, 0, -1, -2, 1, -WINDOW - 1]))
        flags = random.random() < 0.3, random.random() < 0.3
        drawn = random.choice([0.0, 0.3, 1.0])
        heads.append((place, random.randrange(MAX_LANES + 2), base_len, first, size, *flags))
        for i in range(size):
            parent = random.choice([-1, -1, max(first, 0) + i - 1, random.randint(-1, max(first, 0) + i)])
            parent = min(parent, i - 1) if first == NEXT_IDS else min(parent, first + i - 1)
            row = random.randrange(len(distributions)) if random.random() < drawn else -1
            nodes.append((random.randrange(NUM_TOKENS if size < 30 else 1000), parent, row))
    places, lanes, base_lens, firsts, sizes, wholes, measured = map(list, zip(*heads, strict=True))
    tokens, parents, rows = np.array(nodes, np.int32).reshape(-1, 3).T.copy()
    scores = np.array([random.choice([0.0, -1e9, -random.random(), -3 * random.random()]) for _ in nodes])
    both.do(
        "graft", places, lanes, base_lens, firsts, sizes, tokens, parents, scores, arrived=random.random(),
        is_whole=wholes, is_measured=measured, rows=rows, distributions=distributions,
    )  # fmt: skip


def verified(both: Both, random: Random) -> None:
    """A step of some sessions: what may be verified, what is, and what becomes of it."""
    places = random.sample(both.places, random.randint(1, len(both.places)))
    ends = [int(both.reference.length[place]) + random.choice([1, 3, NO_LIMIT // 2]) for place in places]
    firsts, nodes = both.do("candidates", places, ends, random.choice([0.0, 0.02, 0.2]))
    chains = both.do("best_chains", firsts, nodes, random.randint(1, 6))
    if random.random() < 0.3:
        firsts, nodes = chains
    sizes = [random.randint(0, int(size)) for size in np.diff(firsts)]  # parents come first
    chosen = [nodes[first : first + size] for first, size in zip(firsts.tolist(), sizes, strict=False)]
    some = np.concatenate([*chosen, np.zeros(0, np.int32)])
    both.do("flatten", np.cumsum([0, *sizes], dtype=np.int64), some)
    assert_equal(*(one.tolist() for one in map(live_of, (both.compiled, both.reference), [places[0]] * 2)), "live")
    is_accepted = np.array([random.random() < 0.5 for _ in some], np.uint8)
    both.do("count", places, sizes, some, is_accepted, random.randrange(1000))
    committed = [[*path_of(both.reference, own, random), random.randrange(NUM_TOKENS)] for own in chosen]
    tokens = np.array([token for own in committed for token in own], np.int32)
    both.do("commit", places, list(map(len, committed)), tokens, sizes)


def selected(both: Both, random: Random) -> None:
    """Of drafts in a lane of the verifier's own, which then learns, what is hung."""
    places = [*random.sample(both.places, random.randint(1, len(both.places))), *random.choice([[], [-1]])]
    lane = random.choice([LEAST_OWN_LANE, 253, 255])  # few, so that each learns much
    sizes = [random.choice([0, 1, 3, 12]) for _ in places]
    parents = np.array([random.randint(-1, i - 1) for size in sizes for i in range(size)], np.int32)
    tokens = np.array([random.randrange(NUM_TOKENS) for _ in parents], np.int32)
    scores = np.array([random.choice([0.0, -random.random(), -4 * random.random()]) for _ in parents], np.float64)
    enough = [random.choice([0.0, 0.0, 0.5, 2.0]) for _ in places]
    least = random.choice([0.0, 0.1, 0.6])
    counts = np.array(sizes, np.int32)
    for _ in range(random.choice([1, 1, 4])):
        kept = both.do("select", places, lane, counts, tokens, parents, scores, enough, rarity=4, least=least)
    lengths = [max(0, int(both.reference.length[place])) for place in places]
    both.do("graft", places, lane, lengths, NEXT_IDS, kept[0].tolist(), *kept[1:], arrived=random.random())


def live_of(trees: DraftTrees, place: int) -> np.ndarray:
    return np.array(trees.operations.live(place), np.int32)


def path_of(trees: DraftTrees, nodes: np.ndarray, random: Random) -> list[int]:
    """The tokens of a path down chosen nodes."""
    path, above = [], -1
    for node in nodes.tolist():
        if trees.parent[node] == above and random.random() < 0.7:
            path.append(int(trees.token[node]))
            above = node
    return path


@needs_compiler
@given(st.randoms(use_true_random=True), st.integers(1, 30))
def test_compiled_and_reference_are_the_same(random: Random, num_events: int) -> None:
    """Answers and all columns, for any operations in any order."""
    play(Both(), random, num_events)


@needs_compiler
@pytest.mark.parametrize("seed", range(40))
def test_so_they_are_in_long_runs(seed: int) -> None:
    """Long enough for places to be used again and for tables to be full."""
    play(Both(), Random(seed), 80)


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 5, 2 * WINDOW + 1])
def test_an_opened_session_has_its_newest_tokens_where_late_drafts_look_for_them(length: int) -> None:
    trees, tokens = DraftTrees(), np.arange(length, dtype=np.int32)
    newest = tokens[-WINDOW:]
    place = trees.open(tokens, takes_distributions=False)
    assert trees.recent[place, newest % WINDOW].tolist() == newest.tolist()


@needs_compiler
def test_the_struct_has_the_columns() -> None:
    """C and Python name as many columns, and count the same."""
    library = kernels()
    assert library is not None
    assert library.trees_size() == len(_Struct._fields_)
    assert len(COUNTS) == 9


def play_all(library: ctypes.CDLL) -> None:
    for seed in range(200):
        play(Both(library), Random(seed), 40)


BUGS = {
    "a committed id is taken for the length before it": (
        "trees.c", "COMMITTED - (t->position[follower] + 1)", "COMMITTED - t->position[follower]"),
    "a cut leaves children": ("trees.h", "t->mark[child] = left, left = child;", "(void)child;"),
    "ids of cut nodes stay": ("trees.h", "t->table_nodes[at] = becomes, ", ""),
    "a later sibling is likelier than the one before": ("choose.h", "own < most ? own : most", "own"),
    "rejected siblings are not regarded": ("choose.h", "left -= own, above = node;", "above = node;"),
    "point masses come first": ("choose.h", "return other_is_point;", "return is_point;"),
    "a position has two sampled groups": ("graft.h", "fresh->group = NONE;", ";"),
    "a gap in the ids is not seen": ("graft.h", "if (first_id > t->newest_id[lane] + 1)", "if (0)"),
    "orphans are stale": ("graft.h", "? ORPHANS : STALE", "? STALE : STALE"),
    "a table's live ids are overwritten": ("graft.h", "t->table_nodes[at] >= 0) return 0;", "0) return 0;"),
    "drafts are cut where they should be dropped": ("graft.h", "head[IS_WHOLE] && ", "0 && "),
    "unjudged nodes are learned from": ("trees.c", "t->parent[node] != at) continue;", "0) continue;"),
    "measured scores are calibrated": ("choose.h", "if (t->is_measured[node] && ", "if (0 && "),
    "a chain may be too long": ("choose.h", "i < end && depths[begin] <= most;", "i < end;"),
    "a lane that was never tried is another's": ("select.h", "== lane_id) return", ">= lane_id) return"),
    "what came true is not regarded": ("select.h", "above * trust *", "above *"),
    "a promise may come true more than once": ("select.h", "return found < 1 ? found : 1;", "return found;"),
    "nothing is tried": ("select.h", "if (*num_declined) continue;", "continue;"),
    "what is tried promises all": ("select.h", "promise : reach[0]", "promise : 1e9"),
    "less than enough is hung": ("select.h", "if (promise < enough[s]) continue;", ""),
    "parents are those of before": ("select.h", "NONE : places[parent]", "NONE : parent"),
    "a session has another's nodes": ("select.h", "first += size, ", ""),
    "groups are never free": ("trees.h", "!--t->group_size[group]", "--t->group_size[group] < 0"),
    "a lane keeps what another has learned": ("graft.h", "memset(t->trials[lane], 0, sizeof t->trials[lane]);", ""),
}  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug, tmp_path):
    """In some of the long runs."""
    name, right, wrong = BUGS[bug]
    shutil.copytree(SOURCE.parent, tmp_path / "kernels")
    text = (tmp_path / "kernels" / name).read_text("utf-8")
    assert right in text
    (tmp_path / "kernels" / name).write_text(text.replace(right, wrong), "utf-8")
    library = with_signatures(ctypes.CDLL(str(built(tmp_path / "kernels" / SOURCE.name, COMPILER))))
    with pytest.raises(AssertionError):
        play_all(library)
