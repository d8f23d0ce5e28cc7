"""Suffix trees in C: kernels/suffix.c."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from specq.drafting.suffix.reference import DOUBTS, MOST_NODES, DraftedSuffix
from specq.runtime import library

SOURCE = Path(__file__).parent / "kernels" / "suffix.c"


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled library; None if this machine cannot build it."""
    found = library(SOURCE)
    return None if found is None else with_signatures(found)


def with_signatures(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument and result types of a library's functions."""
    pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
    found.suffix_new.restype = pointer
    found.suffix_free.argtypes = [pointer]
    found.suffix_free.restype = None
    found.suffix_extend.argtypes = [pointer, pointer, number]
    found.suffix_end_text.argtypes = [pointer]
    for count in (found.suffix_num_nodes, found.suffix_num_tokens):
        count.argtypes, count.restype = [pointer], number
    found.suffix_draft.argtypes = [pointer, number, pointer, *[number] * 4, real, *[pointer] * 4]
    found.suffix_draft.restype = number
    found.suffix_draft_texts.argtypes = [pointer, number, *[pointer] * 5, number, pointer, number, real, *[pointer] * 5]
    found.suffix_draft_texts.restype = number
    return found


_Ids, _Probs = ctypes.c_int32 * MOST_NODES, ctypes.c_double * MOST_NODES
DOUBTS_IN_C = (ctypes.c_double * len(DOUBTS))(*DOUBTS)


class CompiledMatcher:
    """A suffix tree in C. See `specq.drafting.suffix.SuffixTree`."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self.address = kernels.suffix_new()
        if not self.address:
            raise MemoryError
        weakref.finalize(self, kernels.suffix_free, self.address)
        self._alone = (ctypes.c_void_p * 1)(self.address)
        self._drafted = _Ids(), _Ids(), _Probs()  # of drafts where this tree is the first

    @property
    def num_tokens(self) -> int:
        found: int = self._kernels.suffix_num_tokens(self.address)
        return found

    @property
    def num_nodes(self) -> int:
        found: int = self._kernels.suffix_num_nodes(self.address)
        return found

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `SuffixTree.extend`."""
        count = len(token_ids)
        if self._kernels.suffix_extend(self.address, (ctypes.c_int32 * count)(*token_ids), count):
            raise MemoryError

    def end_text(self) -> None:
        """See `SuffixTree.end_text`."""
        if self._kernels.suffix_end_text(self.address):
            raise MemoryError

    @staticmethod
    def draft(
        trees: Sequence[CompiledMatcher], tail: Sequence[int], most: int, most_depth: int, fan_out: int, floor: float
    ) -> DraftedSuffix:
        """See `specq.drafting.suffix.draft`."""
        first = trees[0]
        at = first._alone if len(trees) == 1 else (ctypes.c_void_p * len(trees))(*[tree.address for tree in trees])  # noqa: SLF001 - of its own class
        tokens, parents, probs = first._drafted  # noqa: SLF001
        limits = min(most, MOST_NODES), most_depth, fan_out, floor
        count = first._kernels.suffix_draft(  # noqa: SLF001
            at, len(trees), (ctypes.c_int32 * len(tail))(*tail), len(tail), *limits, DOUBTS_IN_C, tokens, parents, probs
        )
        return DraftedSuffix(tokens[:count], parents[:count], probs[:count])
