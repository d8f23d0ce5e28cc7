"""The results of a call: pieces of text during a job, one result after it.

Rule: a `Result` has exactly the fields of a results file's line (docs/reference/jobs.md, "Results"). `to_dict` returns
that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from specq.client.events import NewTokens, ReceivedTranscript
from specq.client.parameters import TextOptions
from specq.client.request import Request
from specq.protocol import OWN, RejectedDraft, RenamedCounts, RoundTime, SamplingParams, read_prompt_rows
from specq.text import Detokenizer, PromptIds, StopMatcher, TextCodec

PromptLogprobs = list[dict[str, Any] | None] | None  # None: not requested


@dataclass(frozen=True, slots=True)
class Result:
    """A completion.

    token_ids      all generated tokens, including the token that ended the text.
    text           their text, without special tokens and stop strings.
    finish_reason  "stop", "length", "cancelled" or "error".
    index          index among several completions of the prompt, from 0; None for a single completion.
    usage          prompt_tokens, completion_tokens, cached_tokens. The last is the number of prompt tokens with cached
                   KV when the session that gave the first token opened.
    logprobs       if requested, for each token {"token_id", "logprob", "top": [[token id, logprob], ...], "offset"}.
                   `offset` is where the token's part of `text` begins.
    stop_reason    the stop string or the id of the stop token that ended the text; None for all other ends.
    prompt_logprobs  if requested, the same for each token of the prompt, without "offset". None for the first.
    stats          rounds, draft_tokens, accepted_tokens, acceptance_rate, mean_accepted_length (including the target's
                   own token). tokens_per_second and time_to_first_token_ms, both from the submission. candidates and
                   depth: mean leaves and depth of the verified trees. seed: the seed in use (`seed_used`).
    internal       further counts, whose names may change. hit_rate: rounds that began with live nodes. wasted_rows:
                   nodes verified but not accepted. min_accept_prob: the mean minimum probability of verified nodes. The
                   broker's and verifier's counters (`JobStats`, `SessionStats`).
    """

    id: Any
    prompt: str | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "error"
    usage: dict[str, int] = field(default_factory=lambda: _usage(0, 0, 0))
    stats: dict[str, Any] = field(default_factory=lambda: speculation_stats({}))
    error: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    index: int | None = None
    prompt_logprobs: PromptLogprobs = None
    stop_reason: int | str | None = None
    internal: dict[str, Any] = field(default_factory=dict)

    def to_dict(self, *, verbose: bool = False) -> dict[str, Any]:
        """Return the result as JSON-able values.

        `index`, `stop_reason` and log-probabilities are there only if set, `internal` only if `verbose`.
        """
        values = asdict(self)
        index, internal = values.pop("index"), values.pop("internal")
        head = {"id": values.pop("id")} | ({} if index is None else {"index": index})
        asked = {name: values.pop(name) for name in ("stop_reason", "logprobs", "prompt_logprobs")}
        tail = {name: value for name, value in asked.items() if value is not None}
        return head | values | tail | ({"internal": internal} if verbose else {})


@dataclass(frozen=True, slots=True)
class Piece:
    """The text and tokens of one message.

    text      text that may be shown now; a token with uncertain text adds none.
    token_ids, origins  the new tokens, and the origin of each: a name of `specq.protocol.ORIGINS`.
    texts     the text that each token makes certain.
    logprobs  if requested, of each new token, as in `Result`.
    prompt_logprobs  if requested, in the first piece, as in `Result`.
    spans     `text` cut by origin: (text, origin).
    rejected  with the option `explain`: drafts that were verified beside these tokens and not accepted.
    rounds    with the option `explain`: the tokens' rounds.
    result    set in the completion's last piece.
    index     index among the completions of the prompt, from 0.
    place     index among several prompts, from 0.
    known     text of tokens before these that the reader knows already; it is not in `text`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    spans: tuple[tuple[str, str], ...] = ()
    result: Result | None = None
    index: int = 0
    place: int = 0
    logprobs: tuple[dict[str, Any], ...] = ()
    rejected: tuple[RejectedDraft, ...] = ()
    rounds: tuple[RoundTime, ...] = ()
    prompt_logprobs: PromptLogprobs = None
    known: str = ""


class PieceMaker:
    """Turns new tokens of one completion into pieces; the first `num_known` tokens give no text."""

    def __init__(
        self,
        codec: TextCodec,
        params: SamplingParams,
        index: int = 0,
        place: int = 0,
        num_known: int = 0,
        before: PromptIds = (),
        options: TextOptions = TextOptions(),  # noqa: B008 - frozen
    ) -> None:
        """Take the codec, the parameters and the completion's place.

        before  the prompt.
        """
        self._text_of, self._options = (codec, params.stop, params.min_tokens, before), options
        self._num_top = params.prompt_logprobs  # -1: no log-probabilities of the prompt, or they were in a piece
        self._index, self._place, self._num_known = index, place, num_known
        self._last_origin = OWN  # of the last token

    @cached_property
    def _matcher(self) -> StopMatcher:
        """The matcher of stop strings, created for the first piece: most callers of `generate` request none."""
        return _matcher(self._options, *self._text_of)

    def piece(self, new: NewTokens) -> Piece:
        """Return the text that these tokens make certain."""
        skipped = min(self._num_known, len(new.token_ids))
        self._num_known -= skipped
        of_prompt = None if skipped else prompt_logprobs(new.prompt_rows, self._text_of[-1], self._num_top)
        self._num_top = -1 if new.token_ids else self._num_top
        offsets, texts = zip(*map(self._push, new.token_ids), strict=True) if new.token_ids else ((), ())
        known, texts = "".join(texts[:skipped]), texts[skipped:]
        origins = new.origins[skipped:]
        self._last_origin = origins[-1] if origins else self._last_origin
        return Piece(
            "".join(texts),
            new.token_ids[skipped:],
            origins,
            texts,
            _spans(texts, origins),
            index=self._index,
            place=self._place,
            logprobs=_placed(new.logprobs, offsets)[skipped:],
            rejected=() if skipped else new.rejected,
            rounds=() if skipped else new.rounds,
            prompt_logprobs=of_prompt,
            known=known,
        )

    def _push(self, token_id: int) -> tuple[int, str]:
        """Take a token; return where its text begins, and the text that it makes certain."""
        offset = self._matcher.offset
        self._matcher.push((token_id,))
        return offset, self._matcher.take()

    def last(self, result: Result, new: NewTokens | None = None) -> Piece:
        """Return the last piece: the last tokens, the text held back, and the result."""
        piece = self.piece(new or NewTokens(0, (), ()))
        rest = self._matcher.finish()
        texts = (*piece.texts[:-1], piece.texts[-1] + rest) if piece.texts else ()
        spans = _spans(texts or (rest,), piece.origins or (self._last_origin,))
        return replace(piece, text=piece.text + rest, texts=texts, spans=spans, result=result)


def prompt_logprobs(rows: bytes, prompt_ids: PromptIds, num_top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt; None if they are not requested, or not there."""
    if num_top < 0 or not (rows or len(prompt_ids) == 1):
        return None
    return read_prompt_rows(np.frombuffer(rows, np.uint8), np.asarray(prompt_ids, np.int32), num_top)


def _spans(texts: Sequence[str], origins: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the text of tokens, cut where its origin changes."""
    shown = [part for part in zip(texts, origins, strict=True) if part[0]]
    runs = groupby(shown, key=lambda part: part[1])
    return tuple(("".join(text for text, _ in run), origin) for origin, run in runs)


def _placed(entries: Sequence[dict[str, Any]], offsets: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """Return log-probabilities with the offsets of their tokens, or none if none were requested."""
    return tuple({**entry, "offset": offset} for entry, offset in zip(entries, offsets, strict=False))


def _matcher(options: TextOptions, *text_of: Any) -> StopMatcher:
    """Return the matcher of stop strings of a completion."""
    special, keeps = not options.skip_special_tokens, options.include_stop_str_in_output
    shown = frozenset[str]() if special else options.shown
    return StopMatcher(*text_of, with_special=special, keeps_stop=keeps, shown=shown)


class CompletionText(NamedTuple):
    """Text up to the first possible stop string, each token's offset in it, and that stop string or "".

    The offsets are there only if log-probabilities are requested.
    """

    text: str
    offsets: list[int]
    stop: str = ""


def completion_text(
    codec: TextCodec,
    token_ids: list[int],
    params: SamplingParams,
    before: PromptIds = (),
    options: TextOptions = TextOptions(),  # noqa: B008 - frozen
) -> CompletionText:
    """Return the text of tokens.

    before  the prompt.
    """
    if not params.stop and params.logprobs < 0 and not options.shown:
        detokenizer = Detokenizer(codec, before, with_special=not options.skip_special_tokens)
        return CompletionText(detokenizer.push_all(token_ids) + detokenizer.flush(), [])
    matcher, offsets = _matcher(options, codec, params.stop, params.min_tokens, before), list[int]()
    for token_id in token_ids:
        offsets.append(matcher.offset)
        matcher.push((token_id,))
    return CompletionText(matcher.finish(), offsets, matcher.found)


def make_result(request: Request, position: int, transcript: ReceivedTranscript, codec: TextCodec | None) -> Result:
    """Return the result of an ended completion; `position` is its index in the request.

    Without a codec the result has no text.
    """
    job = request.submits[position]
    text, offsets, stop = CompletionText("", [])
    if codec:
        text, offsets, stop = completion_text(codec, transcript.token_ids, job.params, job.prompt_ids, request.text)
    entries = transcript.logprobs.to_list(transcript.token_ids) if job.params.logprobs >= 0 else None
    return Result(
        id=request.id,
        prompt=request.prompt,
        text=text,
        token_ids=transcript.token_ids,
        finish_reason=transcript.finish,
        usage=_usage(len(job.prompt_ids), len(transcript.token_ids), int(transcript.stats.get("cached_tokens", 0))),
        stats=speculation_stats(transcript.stats) | _timing(transcript) | {"seed": job.params.seed},
        logprobs=entries if entries is None or not codec else list(_placed(entries, offsets)),
        index=_index(request, position),
        stop_reason=_stop_reason(transcript, job.params, stop),
        prompt_logprobs=prompt_logprobs(transcript.prompt_rows, job.prompt_ids, job.params.prompt_logprobs),
        internal=RenamedCounts(internal_counts(transcript.stats)),
    )


def _stop_reason(transcript: ReceivedTranscript, params: SamplingParams, stop: str) -> int | str | None:
    """Return the stop string that ended a text, or else the stop token. None for the model's own end."""
    if transcript.finish != "stop":
        return None
    last = transcript.token_ids[-1] if transcript.token_ids else None
    return stop or (last if last in params.stop_token_ids else None)


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "cached_tokens": cached_tokens}


def failed_result(request: Request, position: int, reason: str) -> Result:
    """Return the result of a failed completion."""
    return Result(request.id, request.prompt, error=reason, index=_index(request, position))


def _index(request: Request, position: int) -> int | None:
    return position if len(request.submits) > 1 else None


_COUNTED = ("rounds", "draft_tokens", "accepted_tokens")


def speculation_stats(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the broker's counts of drafts, and their rates.

    Returns 0 if there were no drafts.
    """
    rounds, drafted, accepted = (int(counts.get(name, 0)) for name in _COUNTED)
    return {
        "rounds": rounds,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "mean_accepted_length": round(1 + accepted / rounds, 4) if rounds else 0.0,
        "tokens_per_second": 0.0,
        "time_to_first_token_ms": 0.0,
        **_tree_shape(counts),
    }


def internal_counts(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the other counts, for work on specq itself."""
    rest = {name: value for name, value in counts.items() if name not in (*_COUNTED, "cached_tokens")}
    return _means(counts, int(counts.get("rounds", 0))) | rest


def _tree_shape(counts: dict[str, Any]) -> dict[str, float]:
    """Return the mean leaves and depth of the verified trees, if the verifier counted them."""
    sums = {"candidates": "leaves", "depth": "depths"}
    if not {"drafted_rounds", *sums.values()} <= set(counts):
        return {}
    rounds = int(counts["drafted_rounds"])
    return {name: round(counts[key] / rounds, 4) if rounds else 0.0 for name, key in sums.items()}


def _means(counts: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return means over the rounds, if the verifier has counted them."""
    if not rounds or not {"hits", "min_accept_probs"} <= set(counts):
        return {}
    return {
        "hit_rate": round(counts["hits"] / rounds, 4),
        "wasted_rows": int(counts.get("draft_tokens", 0)) - int(counts.get("accepted_tokens", 0)),
        "min_accept_prob": round(counts["min_accept_probs"] / rounds / 1e3, 4),
    }


def _timing(transcript: ReceivedTranscript) -> dict[str, float]:
    elapsed = max((transcript.finished or transcript.started) - transcript.started, 1e-9)
    first = (transcript.first_token or transcript.started) - transcript.started
    return {
        "tokens_per_second": round(len(transcript.token_ids) / elapsed, 2),
        "time_to_first_token_ms": round(first * 1e3, 2),
    }
