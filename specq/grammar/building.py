"""Builds the matcher of one grammar under limits, and walks along texts that it allows.

The trial and the verifier build in the same way. So what passes the trial is built at the verifier too.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from specq.grammar.limits import Limits
from specq.protocol import JobError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_REASON = 300  # characters of what llguidance says
MOST_STEPS = 32  # of one walk
_DEAD_END = "NoExtension"  # llguidance's name for it
_UNSAID = "<non-verbose/>"  # where llguidance leaves out the state of the parser
# Where these tokens are allowed, a value ends soon: a walk that prefers them meets many rules of a grammar.
_CLOSERS = ('"', '",', '":', "}", "]", ",", "0", "a")


def build_matcher(tokenizer: LLTokenizer, grammar: str, limits: Limits) -> LLMatcher:
    """Return the matcher of a grammar (JSON text). Raises JobError with llguidance's reason and place."""
    from llguidance import LLMatcher, LLParserLimits

    from specq.grammar.forms import llguidance_grammar

    within = LLParserLimits(
        max_items_in_row=limits.items_in_row,
        initial_lexer_fuel=limits.initial_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.step_items,
        max_lexer_states=limits.lexer_states,
        max_grammar_size=limits.grammar_size,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, llguidance_grammar(grammar, tokenizer), log_level=0, limits=within)
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return matcher


class SlowMaskError(JobError):
    """A mask took longer than its limit."""


def try_grammar(tokenizer: LLTokenizer, grammar: str, limits: Limits) -> None:
    """Build a grammar and walk along it. Raises JobError for what exceeds a limit, or allows no text."""
    try:
        _try_once(tokenizer, grammar, limits)
    except SlowMaskError:  # once more: a busy machine's caches make masks slower too
        _try_once(tokenizer, grammar, limits)


def _try_once(tokenizer: LLTokenizer, grammar: str, limits: Limits) -> None:
    for seed, preferred in enumerate(((), closing_tokens(tokenizer))):
        matcher = build_matcher(tokenizer, grammar, limits)
        walk(matcher, preferred, random.Random(seed), limits.mask_s)


def warm(tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
    """Meet the first states of a matcher on a copy, which shares its lexer. The matcher's own state stays."""
    walk(matcher.deep_copy(), closing_tokens(tokenizer), random.Random(0), float("inf"))


def closing_tokens(tokenizer: LLTokenizer) -> tuple[int, ...]:
    spellings = (tokenizer.tokenize_str(text) for text in _CLOSERS)
    return tuple(ids[0] for ids in spellings if len(ids) == 1)


def walk(matcher: LLMatcher, preferred: tuple[int, ...], draw: random.Random, mask_s: float) -> None:
    """Follow allowed and forced tokens, with a mask for each. Raises JobError with the reason and the place.

    Where one of the tokens `preferred` is allowed, the walk takes the first such token. Otherwise it draws one.
    """
    for num_tokens in range(MOST_STEPS):
        began = time.thread_time()  # of this thread only: a busy machine does not count
        mask = matcher.compute_bitmask()
        spent = time.thread_time() - began
        if spent > mask_s:
            took = f"{1e3 * spent:.0f} ms, but may take {1e3 * mask_s:.0f} ms"
            raise SlowMaskError(_reason(f"the mask after {num_tokens} tokens of a trial takes {took}"), field="grammar")
        if matcher.is_stopped():
            return _check_end(matcher, num_tokens)
        forced = matcher.compute_ff_tokens()
        token_ids = forced or _drawn(mask, preferred, draw)
        if not token_ids or not matcher.consume_tokens(token_ids):
            return _check_end(matcher, num_tokens)
    return None


def _check_end(matcher: LLMatcher, num_tokens: int) -> None:
    said = matcher.get_error()
    if said.startswith(_DEAD_END) or not (said or matcher.is_accepting() or matcher.is_stopped()):
        said = "nothing is allowed"
    if said:
        raise _refused(f"{said} (after {num_tokens} tokens of a trial)")


def _drawn(mask: bytes, preferred: tuple[int, ...], draw: random.Random) -> list[int]:
    """Return one allowed token, or none. `mask`: a bit for each token, the lowest first."""
    for token_id in preferred:
        if mask[token_id // 8] >> token_id % 8 & 1:
            return [token_id]
    at = draw.randrange(len(mask))
    rest = mask[at:].lstrip(b"\0") or mask.lstrip(b"\0")  # the next byte with an allowed token
    if not rest:
        return []
    bits = [bit for bit in range(8) if rest[0] >> bit & 1]
    return [8 * (len(mask) - len(rest)) + draw.choice(bits)]


def _refused(reason: str) -> JobError:
    return JobError(_reason(reason), field="grammar")


def _reason(said: str) -> str:
    """Return a reason on one line, of limited length."""
    return f"grammar: {' '.join(said.replace(_UNSAID, ' ').split())}"[:MOST_REASON]
