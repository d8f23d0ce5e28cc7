"""Shapes a target's logits before temperature: allowed and bad tokens, min_tokens, logit_bias, penalties.

The order is vLLM's.

Penalties count the tokens before a row's token, in the committed context and the drafted path. So each node is judged
as if its path had been committed. Speculation does not change the text. Steps without such parameters cost no time. For
the others, only the few changed logits are read and written. They are restored when the step is judged. Only with
`allowed_token_ids` are whole rows written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specq.protocol import Bans, EngineError, Float32Array, Int32Array, Int64Array, IntpArray, SamplingParams, Tree
from specq.verification.host_logits import HostEdits, Logits, Places
from specq.verification.packing import JudgedStep, Placed
from specq.verification.step_batch import SHAPED


@contextmanager
def shaped(steps: Placed, logits: Logits) -> Iterator[Logits]:
    """Yield f32[rows, vocab], shaped as the steps require.

    Without changes these are the logits themselves. Otherwise the logits are changed in place and restored at the end.
    If their type or layout does not fit, a copy is changed. Raises EngineError for a step that needs its history and
    has none.
    """
    shaping = [steps[i] for i in (steps.batch.traits & SHAPED).nonzero()[0].tolist()]
    if not shaping:
        yield logits
        return
    for judged in shaping:
        if judged.step.params.needs_history and judged.step.history is None:
            raise EngineError(f"session {judged.step.session_id}: its parameters need the step's history")
    edited = _edits(logits)
    try:
        _shape(edited, shaping)
        yield edited.logits
    finally:
        edited.restore()


def _edits(logits: Logits) -> Edited:
    """Return logits that can be changed and restored, where they are."""
    if isinstance(logits, np.ndarray):
        return HostEdits(logits)
    from specq.verification.tensors import TensorEdits

    return TensorEdits(logits)


class Edited(Protocol):
    """`HostEdits`, or the same for tensors."""

    logits: Logits
    stride: int
    vocab: int

    def put(self, array: npt.NDArray[Any]) -> Any: ...
    def change(self, places: Places, how: Callable[[Any], Any]) -> None: ...
    def keep(self, rows: slice, token_ids: IntpArray) -> None: ...
    def restore(self) -> None: ...


def _places(edited: Edited, judged: JudgedStep, token_ids: npt.NDArray[np.integer]) -> Places:
    """Return the places [rows * tokens] of some tokens in all rows of a step."""
    rows = judged.first_row + np.arange(judged.step.num_judged_rows)
    found: Places = (rows[:, None] * edited.stride + token_ids).ravel()
    return found


def _shape(edited: Edited, steps: Sequence[JudgedStep]) -> None:
    """Make the changes, each kind for all steps at once."""
    for judged in steps:
        if judged.step.params.allowed_token_ids:
            rows = slice(judged.first_row, judged.first_row + judged.step.num_judged_rows)
            allowed = [token for token in judged.step.params.allowed_token_ids if token < edited.vocab]
            edited.keep(rows, np.array(allowed, np.intp))
    banned = [places for judged in steps for places in _banned(edited, judged)]
    if banned:
        places = np.concatenate(banned)
        forbidden = edited.put(np.full(len(places), -np.inf, np.float32))
        edited.change(places, lambda _values: forbidden)
    biased = [_biased(edited, judged) for judged in steps if judged.step.params.logit_bias]
    if biased:
        places, biases = (np.concatenate(parts) for parts in zip(*biased, strict=True))
        edited.change(places, lambda values: values + edited.put(biases))
    penalised = [judged for judged in steps if judged.step.params.has_penalties]
    if penalised:
        places, penalties = _penalties(edited, penalised)
        edited.change(places, lambda values: _penalise(values, penalties))


# --- bans and biases ----------------------------------------------------------------------------------------------


def _banned(edited: Edited, judged: JudgedStep) -> Iterator[Places]:
    """Yield the places that are removed from a step's distributions."""
    params, history = judged.step.params, judged.step.history
    if history is None:
        return
    if history.bans is not None:
        yield from _bad_places(edited, judged, history.bans, history.tail.tolist())
    if judged.step.base_len - history.prompt_len < params.min_tokens:
        num_generated = np.array(judged.row_positions()) - history.prompt_len
        rows = judged.first_row + np.flatnonzero(num_generated < params.min_tokens)
        ends = np.array([token for token in history.end_ids if token < edited.vocab], np.int64)
        yield (rows[:, None] * edited.stride + ends).ravel()


def _bad_places(edited: Edited, judged: JudgedStep, bans: Bans, tail: list[int]) -> Iterator[Places]:
    """Yield the places of the last tokens of banned sequences, in the rows that follow the other tokens."""
    yield _places(edited, judged, _known(bans.alone, edited.vocab))
    if not bans.following:
        return
    for row, before in enumerate(_tails(tail, judged.step.tree)):
        for beginning, lasts in bans.following.get(before[-1], ()) if before else ():
            if before[-len(beginning) :] == beginning:
                yield (judged.first_row + row) * edited.stride + _known(lasts, edited.vocab)


def _known(token_ids: Int64Array, vocab: int) -> Int64Array:
    """Return the ascending tokens that are in the vocabulary."""
    return token_ids[: np.searchsorted(token_ids, vocab)]


def _tails(context: list[int], tree: Tree) -> list[list[int]]:
    """Return, for each row, the last tokens before its own, given those of the context."""
    tails = [context]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        tails.append([*tails[parent + 1], token])
    return tails


def _biased(edited: Edited, judged: JudgedStep) -> tuple[Places, Float32Array]:
    """Return the places [rows * tokens] of biased tokens, and the biases."""
    biases: dict[int, float] = {}
    for token, bias in judged.step.params.logit_bias:
        if token < edited.vocab:
            biases[token] = biases.get(token, 0.0) + bias
    values = np.array(list(biases.values()), np.float32)
    places = _places(edited, judged, np.array(list(biases), np.int64))
    return places, np.tile(values, judged.step.num_judged_rows)


# --- penalties ----------------------------------------------------------------------------------------------------


class _Penalties(NamedTuple):
    """The penalties at n places, each f32[n], an array or a tensor. None if no step asks for it.

    - `divisors`: divides a positive logit and multiplies a negative one. 1 if the token has not occurred.
    - `for_each`: subtracted from the logit, counted for each time that the token was generated.
    - `for_any`: subtracted once if the token was generated.
    """

    divisors: Any
    for_each: Any
    for_any: Any


def _penalties(edited: Edited, steps: Sequence[JudgedStep]) -> tuple[Places, _Penalties]:
    """Return the places of the tokens that have occurred before their row, and their penalties."""
    places, *penalties = map(np.concatenate, zip(*(_of_step(edited, judged) for judged in steps), strict=True))
    params = [judged.step.params for judged in steps]
    asked = (
        any(own.repetition_penalty != 1 for own in params),
        any(own.frequency_penalty for own in params),
        any(own.presence_penalty for own in params),
    )
    parts = zip(penalties, asked, strict=True)
    return places, _Penalties(*(edited.put(part) if is_asked else None for part, is_asked in parts))


def _of_step(edited: Edited, judged: JudgedStep) -> tuple[Places, Float32Array, Float32Array, Float32Array]:
    """Return the same for one step, as arrays."""
    params, history, tree = judged.step.params, judged.step.history, judged.step.tree
    assert history is not None
    num_known = int(history.token_ids.searchsorted(np.int32(edited.vocab)))
    token_ids, counts = _row_counts(history.token_ids[:num_known], history.counts[:num_known], tree, edited.vocab)
    return (
        _places(edited, judged, token_ids),
        _divisors(params, counts, num_known).ravel(),
        (np.float32(params.frequency_penalty) * counts).ravel(),
        (np.float32(params.presence_penalty) * (counts > 0)).ravel(),
    )


def _row_counts(token_ids: Int32Array, counts: Float32Array, tree: Tree, vocab: int) -> tuple[Int32Array, Float32Array]:
    """Return the tokens that may have occurred before a row's own, i32[t], and their counts, f32[rows, t].

    The context's tokens come first. A count is how often the token was generated in the context and on the path to the
    row's node.
    """
    if not tree.num_nodes:
        return token_ids, counts[None]
    drafted = tree.token_ids.tolist()
    columns = _columns(token_ids, tree.token_ids)
    new = [token for token in dict.fromkeys(drafted) if token not in columns and token < vocab]
    columns.update(zip(new, range(len(token_ids), len(token_ids) + len(new)), strict=True))
    of_rows = np.zeros((1 + tree.num_nodes, len(token_ids) + len(new)), np.float32)
    of_rows[0, : len(token_ids)] = counts
    for node, (token, parent) in enumerate(zip(drafted, tree.parents.tolist(), strict=True)):
        of_rows[node + 1] = of_rows[parent + 1]
        if token in columns:
            of_rows[node + 1, columns[token]] += 1
    return np.concatenate([token_ids, np.array(new, np.int32)]), of_rows


def _columns(token_ids: Int32Array, drafted: Int32Array) -> dict[int, int]:
    """Return the places of drafted tokens among ascending tokens, as far as they are present."""
    found = token_ids.searchsorted(drafted)
    is_there = np.append(token_ids, np.int32(-1))[found] == drafted
    return dict(zip(drafted[is_there].tolist(), found[is_there].tolist(), strict=True))


def _divisors(params: SamplingParams, counts: Float32Array, num_known: int) -> Float32Array:
    """Return f32[rows, t]: the repetition penalty if a token has occurred, else 1.

    The first `num_known` tokens have occurred in all rows.
    """
    divisors = np.full(counts.shape, params.repetition_penalty, np.float32)
    divisors[:, num_known:][counts[:, num_known:] == 0] = 1
    return divisors


def _penalise(values: Any, penalties: _Penalties) -> Any:
    """Apply repetition (Keskar et al. 2019, CTRL), frequency and presence penalties (OpenAI) to logits f32[n]."""
    if penalties.divisors is not None:
        values = values.clip(min=0) / penalties.divisors + values.clip(max=0) * penalties.divisors
    for taken in (penalties.for_each, penalties.for_any):
        values = values if taken is None else values - taken
    return values
