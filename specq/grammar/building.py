"""Builds the matcher of one grammar under limits, and walks along texts that it allows.

The trial and the verifier build in the same way. So what passes the trial is built at the verifier too.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from specq.grammar.enforced import check_enforced
from specq.grammar.forms import llguidance_grammar
from specq.grammar.limits import GrammarLimits
from specq.grammar.place import MOST_TRIED, place_of, schemas_of
from specq.grammar.tokenizer import GrammarTokenizer
from specq.grammar.versions import check_version
from specq.protocol import STRICT_ADVICE, JobError, grammar_kind

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_REASON = 300  # characters of what llguidance says
MOST_STEPS = 32  # of one walk
SHORT_STEPS, FEW_WALKS = 8, 8  # each of more walks than these is short, and they share a lexer
_DEAD_END = "NoExtension"  # llguidance's name for it
_OWN_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))")  # a line of `forms`
_IGNORABLE = re.compile(r"Unimplemented keys|Unknown format|oneOf constraints")  # what "strict": false ignores
_OWN_OPTION = re.compile(r"\. Enable '\w+' option to [^,;\n]*")  # jobs have no such option
PREFIX = "grammar: "
# A walk that prefers the first ends values soon, and one that prefers the second begins others: they meet many rules.
_CLOSERS = ('"', '",', '":', "}", "]", ",", "0", "a")
_OPENERS = ('[{"', '["', '{"', "[", "{", '", "', '",', '"', ",", "0", "a")


class SlowMaskError(JobError):
    """A mask took longer than its limit."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One way to follow a grammar: the tokens it begins with, those it prefers, and the seed of what it draws."""

    first: Sequence[int]
    preferred: Sequence[int]
    seed: int
    num_steps: int = MOST_STEPS

    def draw(self) -> random.Random:
        return random.Random(self.seed)


def build_matcher(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> LLMatcher:
    """Return the matcher of a grammar (JSON text). Raises JobError with llguidance's reason and place."""
    from llguidance import LLMatcher, LLParserLimits

    kind = grammar_kind(grammar)
    within = LLParserLimits(
        max_items_in_row=limits.items_in_row_of(kind),
        initial_lexer_fuel=limits.initial_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.step_items,
        max_lexer_states=limits.lexer_states,
        max_grammar_size=limits.grammar_size,
        verbose_errors=False,
    )
    if '"multipleOf"' in grammar:
        check_version(orjson.loads(grammar))
    text = llguidance_grammar(grammar, tokenizer.special)
    matcher = LLMatcher(tokenizer.inner, text, log_level=0, limits=within)
    if matcher.is_error():
        said = matcher.get_error()
        raise _refused(said if kind == "lark" else _OWN_PLACE.sub("", said))
    return matcher


def try_grammar(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> None:
    """Build a grammar and walk along it.

    Raises JobError for what exceeds a limit, allows no text, or is a strict schema that would not be kept.
    """
    check_enforced(orjson.loads(grammar))
    try:
        _try_once(tokenizer, grammar, limits)
    except SlowMaskError:  # once more: a busy machine's caches make masks slower too
        _try_once(tokenizer, grammar, limits)
    except JobError as error:
        raise _refused(f"{error}{_place(tokenizer, grammar, limits)}{_advice(str(error))}") from None


def _place(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> str:
    """Return ", at PLACE" of what a JSON schema cannot be built for, or ""."""

    def reason_of(schema: dict[str, Any], *, is_strict: bool) -> str:
        alone = orjson.dumps({"json_schema": schema, "strict": is_strict}).decode()
        try:
            build_matcher(tokenizer, alone, limits)
        except JobError as error:
            return str(error)
        return ""

    for name, schema, is_strict in islice(schemas_of(orjson.loads(grammar)), MOST_TRIED):
        if reason_of(schema, is_strict=is_strict):
            return f", at {name}{place_of(schema, partial(reason_of, is_strict=is_strict))}"
    return ""


def _advice(reason: str) -> str:
    """Return what helps against a reason, or ""."""
    return STRICT_ADVICE if _IGNORABLE.search(reason) else ""


def _try_once(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> None:
    walks = _walks(tokenizer, grammar)
    are_few = len(walks) <= 1 + 2 * FEW_WALKS
    shared: LLMatcher | None = None
    for at, one in enumerate(walks):
        if shared is None or are_few:
            shared = build_matcher(tokenizer, grammar, limits)
        try:
            follow(shared.deep_copy(), one, limits.mask_s)
        except JobError:
            if not at or are_few:
                raise
            shared = build_matcher(tokenizer, grammar, limits)  # the walks before may have used up the lexer's states
            follow(shared.deep_copy(), one, limits.mask_s)


def warm(tokenizer: GrammarTokenizer, grammar: str, matcher: LLMatcher) -> None:
    """Meet the first states of a matcher on a copy, which shares its lexer. The matcher's own state stays."""
    *_, last = _walks(tokenizer, grammar)
    follow(matcher.deep_copy(), last)


def _walks(tokenizer: GrammarTokenizer, grammar: str) -> list[Walk]:
    """Return the walks of a trial: one that draws, and two behind each opening of the grammar."""
    openings = _openings(orjson.loads(grammar))
    num_steps = MOST_STEPS if len(openings) <= FEW_WALKS else SHORT_STEPS
    ways = [[ids[0] for text in way if len(ids := tokenizer.ids(text)) == 1] for way in (_OPENERS, _CLOSERS)]
    along = [Walk(tokenizer.ids(text), way, seed, num_steps) for way in ways for seed, text in enumerate(openings, 1)]
    return [Walk((), (), 0), *along]


def _openings(found: dict[str, Any]) -> list[str]:
    """Return texts behind which a grammar's rules begin. Without them a walk would stay in the free text."""
    first = found.get("opens", "") + found.get("after", "")
    tag = found.get("structural_tag")
    return [first + one["begin"] for one in tag["structures"]] if tag else [first]


def follow(matcher: LLMatcher, walk: Walk, mask_s: float = math.inf) -> None:
    """Follow allowed and forced tokens, with a mask for each. Raises JobError with the reason and the place."""
    draw = walk.draw()
    matcher.try_consume_tokens(list(walk.first))
    for num_tokens in range(walk.num_steps):
        began = time.thread_time()  # of this thread only: a busy machine does not count
        mask = matcher.compute_bitmask()
        spent = time.thread_time() - began
        if spent > mask_s:
            took = f"{1e3 * spent:.0f} ms, but may take {1e3 * mask_s:.0f} ms"
            raise SlowMaskError(_reason(f"the mask after {num_tokens} tokens of a trial takes {took}"), field="grammar")
        forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        token_ids = forced or drawn(mask, walk.preferred, draw)
        if matcher.is_stopped() or not token_ids or not matcher.consume_tokens(token_ids):
            _check_end(matcher, num_tokens)
            return
        if not num_tokens:
            _check_return(matcher, token_ids)


def _check_return(matcher: LLMatcher, token_ids: list[int]) -> None:
    """Return to the state before these tokens and follow them again, as drafts need it. Raises JobError."""
    if not (matcher.rollback(len(token_ids)) and matcher.consume_tokens(token_ids)):
        raise _refused(matcher.get_error())


def _check_end(matcher: LLMatcher, num_tokens: int) -> None:
    said = matcher.get_error()
    if said.startswith(_DEAD_END) or not (said or matcher.is_accepting() or matcher.is_stopped()):
        said = "nothing is allowed"
    if said:
        raise _refused(f"{said} (after {num_tokens} tokens of a trial)")


def drawn(mask: bytes, preferred: Sequence[int], draw: random.Random) -> list[int]:
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
    """Return a reason on one line, of limited length, without what llguidance quotes of the grammar."""
    first, *others = _OWN_OPTION.sub("", said.removeprefix(PREFIX)).splitlines() or [""]
    errors = [line for line in others if line.startswith("error:")]
    kept = [first[: MOST_REASON // 2] if errors else first, *errors]
    return f"{PREFIX}{' '.join(map(str.strip, kept))}"[:MOST_REASON]
