"""Builds the grammars of jobs beside the verifier's steps: tried in another process, then built in a thread.

- One thread tries grammars that are new, one after the other (`trial_process`). What a trial finds is kept. The owner
  whose last trial is longest ago comes first, so that one owner's grammars do not delay all others.
- Another thread builds a matcher for each job whose grammar has passed, and warms it.

Each job has a matcher that shares nothing with others. Copies of a matcher share the lexer, and so its limit of states:
a text that reaches the limit would end all jobs with the same grammar.

Input: (key, grammar). Output: (key, matcher or None, reason). Rule: no call blocks but `prepare` and `close`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from specq.grammar.building import MOST_REASON, build_matcher, warm
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import GrammarTokenizer, build_tokenizer
from specq.grammar.trial_process import TrialProcess, TrialVerdict
from specq.protocol import SpecqError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_WAITING = 1_024  # jobs
MOST_VERDICTS = 256  # grammars whose verdict is kept
END_S = 10.0

Finished = tuple[int, "LLMatcher | None", str]


class GrammarBuilder:
    """Builds matchers of jobs for one model's tokenizer."""

    def __init__(
        self,
        tokenizer_files: dict[str, str],
        vocab_size: int,
        end_ids: tuple[int, ...],
        limits: GrammarLimits | None = None,
    ) -> None:
        self.on_ready: Callable[[], None] | None = None  # called from a thread when a job is finished
        self.end_ids = end_ids
        self._tokenizer_of = (tokenizer_files, vocab_size, end_ids)
        self._limits = limits or GrammarLimits()
        self._tokenizer: GrammarTokenizer | None = None
        self._loading = threading.Lock()  # guards the tokenizer
        self._trials = TrialProcess(*self._tokenizer_of, self._limits)
        self._changed = threading.Condition()  # guards what follows
        self._untried: OrderedDict[str, list[int]] = OrderedDict()  # grammar -> keys
        self._tried: deque[tuple[int, str, str]] = deque()  # key, grammar, why it is refused
        self._waiting: dict[int, str] = {}  # the grammar of each key that is neither finished nor cancelled
        self._owners: dict[int, str] = {}  # of the same keys
        self._num_trials, self._turns = 0, dict[str, int]()  # by owner: the number of the last trial
        self._finished: list[Finished] = []
        self._verdicts: OrderedDict[str, TrialVerdict] = (
            OrderedDict()
        )  # grammar -> verdict, the least recently used first
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def prepare(self) -> str:
        """Load the tokenizer. Return why this model cannot follow grammars, "": it can.

        It holds the GIL (0.2 s for 49,152 tokens), so a verifier calls it before its first step.
        """
        try:
            self.tokenizer()
        except SpecqError as error:
            return str(error)
        return ""

    def tokenizer(self) -> GrammarTokenizer:
        """Return the tokenizer, loaded at the first call. Raises ConfigError."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(*self._tokenizer_of)
            return self._tokenizer

    def begin(self, key: int, grammar: str, owner: str = "") -> None:
        """Build the matcher of a job. `ready` returns it later."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._finished.append((key, None, f"grammar: {MOST_WAITING} others are waiting to be built; try again"))
            else:
                self._waiting[key], self._owners[key] = grammar, owner
                self._sort_in(key, grammar)
                self._start_threads()
                self._changed.notify_all()
                return
        self._call_back()

    def ready(self) -> list[Finished]:
        """Return what was finished since the last call: key, matcher or None, and why there is none."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def cancel(self, key: int) -> None:
        """Forget a job. `ready` does not return it."""
        with self._changed:
            self._waiting.pop(key, None)
            self._owners.pop(key, None)
            self._finished = [one for one in self._finished if one[0] != key]

    def close(self) -> None:
        """End the threads and the process of trials."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._trials.close()
        for thread in self._threads:
            thread.join(END_S)

    def _sort_in(self, key: int, grammar: str) -> None:
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            self._untried.setdefault(grammar, []).append(key)
        else:
            self._verdicts.move_to_end(grammar)
            self._tried.append((key, grammar, verdict.reason))

    def _start_threads(self) -> None:
        if not self._threads:
            for work in (self._try_all, self._build_all):
                self._threads.append(threading.Thread(target=work, name=f"grammar{work.__name__}", daemon=True))
                self._threads[-1].start()

    def _try_all(self) -> None:
        """Try new grammars until `close`. The process of trials ends with this thread."""
        while (grammar := self._next_untried()) is not None:
            verdict = self._verdict_of(grammar)
            with self._changed:
                if verdict.is_final:
                    self._keep(grammar, verdict)
                self._tried += ((key, grammar, verdict.reason) for key in self._untried.pop(grammar))
                self._changed.notify_all()
        self._trials.reap()

    def _next_untried(self) -> str | None:
        """Wait for a grammar that a job still waits for. None: closed."""
        with self._changed:
            while not self._is_closed:
                owners = dict[str, set[str]]()  # by grammar
                for grammar, keys in list(self._untried.items()):
                    waiting = {self._owners[key] for key in keys if self._waiting.get(key) == grammar}
                    if waiting:
                        owners[grammar] = waiting
                    else:
                        del self._untried[grammar]
                if owners:
                    found = min(owners, key=lambda one: min(self._turns.get(owner, 0) for owner in owners[one]))
                    self._num_trials += 1
                    present = set[str]().union(*owners.values())
                    self._turns = {owner: turn for owner, turn in self._turns.items() if owner in present}
                    self._turns |= dict.fromkeys(owners[found], self._num_trials)
                    return found
                self._changed.wait()
        return None

    def _verdict_of(self, grammar: str) -> TrialVerdict:
        try:
            self.tokenizer()  # a model that cannot follow grammars needs no trial
            return self._trials.tried(grammar)
        except (SpecqError, OSError) as error:
            return TrialVerdict(f"grammar: {error}", is_final=False)

    def _keep(self, grammar: str, verdict: TrialVerdict) -> None:
        self._verdicts[grammar] = verdict
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)

    def _build_all(self) -> None:
        while (tried := self._next_tried()) is not None:
            key, grammar, reason = tried
            self._finish(key, grammar, *self._built(grammar) if not reason else (None, reason))

    def _next_tried(self) -> tuple[int, str, str] | None:
        """Wait for a job whose grammar was tried. None: closed."""
        with self._changed:
            while not self._is_closed:
                while self._tried:
                    tried = self._tried.popleft()
                    if self._waiting.get(tried[0]) == tried[1]:
                        return tried
                self._changed.wait()
        return None

    def _built(self, grammar: str) -> tuple[LLMatcher | None, str]:
        try:
            tokenizer = self.tokenizer()
            matcher = build_matcher(tokenizer, grammar, self._limits)
            warm(tokenizer, grammar, matcher)
        except SpecqError as error:
            return None, str(error)
        except BaseException as error:  # noqa: BLE001 - a panic of Rust code is not an Exception
            return None, f"grammar: {type(error).__name__}: {error}"[:MOST_REASON]
        return matcher, ""

    def _finish(self, key: int, grammar: str, matcher: LLMatcher | None, reason: str) -> None:
        with self._changed:
            if self._waiting.get(key) != grammar:  # cancelled meanwhile
                return
            del self._waiting[key]
            self._owners.pop(key, None)
            self._finished.append((key, matcher, reason))
        self._call_back()

    def _call_back(self) -> None:
        if self.on_ready is not None:
            self.on_ready()
