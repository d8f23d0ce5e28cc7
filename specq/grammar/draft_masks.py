"""The grammar of one session at a drafter: what it may draft. Drafts are hints, so here a grammar only saves them.

Rule: a grammar harms no other session. One that raises, that forbids what was committed, or whose masks are slow
(`step_masks`), ends. From then on the session drafts everything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import structlog

from specq.grammar.session_grammar import SessionGrammar
from specq.grammar.step_masks import MOST_SLOW, SLOW_MASK_S, TOO_SLOW
from specq.protocol import Int32Array

log = structlog.get_logger(__name__)


class DraftMasks:
    """The masks of one session's drafts, for `specq.drafting.interface.MaskBehind`.

    has_ended   whether it allows everything.
    """

    def __init__(self, grammar: SessionGrammar) -> None:
        """Take a grammar at its start."""
        self._grammar = grammar
        self._num_slow = 0
        self.has_ended = False

    def commit(self, token_ids: list[int]) -> None:
        """Follow tokens of the transcript."""
        if self.has_ended:
            return
        try:
            self._grammar.commit(token_ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of Rust code is not an Exception
            self._end(str(error))

    def __call__(self, path: Sequence[int]) -> Int32Array | None:
        """Return the mask i32[words] behind drafted tokens; see `SessionGrammar.mask_behind`."""
        if not self.has_ended:
            started = time.thread_time()
            try:
                words = self._grammar.mask_behind(path)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - as above
                self._end(str(error))
            else:
                self._watch(time.thread_time() - started)
                if not self.has_ended:
                    return words
        return np.full(self._grammar.num_words, -1, np.int32)

    def _watch(self, seconds: float) -> None:
        self._num_slow += seconds > SLOW_MASK_S
        if reason := self._grammar.reason():
            self._end(reason)
        elif self._num_slow > MOST_SLOW:
            self._end(TOO_SLOW)

    def _end(self, reason: str) -> None:
        self.has_ended = True
        log.info("grammar_not_followed", reason=reason[:300])
