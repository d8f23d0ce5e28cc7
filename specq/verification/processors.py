"""What shapes a target's logits before temperature: bad tokens, min_tokens, logit_bias, penalties; in this order, vLLM's.

Penalties count what stands before a row's token: the committed context and the drafted path to the row's node. So each
node is judged as if its path had been committed, and speculation changes nothing. Steps that ask for none of this
cost nothing; the others' rows are changed in a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specq.errors import EngineError
from specq.params import SamplingParams
from specq.types import History, Tree
from specq.verification.packing import JudgedStep


def process(steps: Sequence[JudgedStep], logits: torch.Tensor) -> torch.Tensor:
    """Return f32[rows, vocab], a changed copy, or the logits themselves where no step asks for a change.

    Raises EngineError for a step that needs its history and has none.
    """
    shaping = [judged for judged in steps if judged.step.params.logit_bias or judged.step.params.needs_history]
    if not shaping:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for judged in shaping:
        rows = logits[judged.first_row : judged.first_row + judged.step.num_judged_rows]
        _shape(rows, judged)
    return logits


def _shape(rows: torch.Tensor, judged: JudgedStep) -> None:
    """Change one step's rows f32[1 + nodes, vocab] in place."""
    params, history, tree = judged.step.params, judged.step.history, judged.step.tree
    if params.needs_history:
        if history is None:
            raise EngineError(f"session {judged.step.session_id}: its parameters need the step's history")
        _ban_sequences(rows, params.bad_token_ids, history, tree)
        num_generated = np.array(judged.row_positions()) - history.prompt_len
        _ban(rows, np.flatnonzero(num_generated < params.min_tokens).tolist(), history.end_ids)
    for token, bias in params.logit_bias:
        if token < rows.shape[1]:
            rows[:, token] += bias
    if params.has_penalties and history is not None:
        _penalise(rows, params, history, tree)


def _ban(rows: torch.Tensor, of_rows: Sequence[int], token_ids: Sequence[int]) -> None:
    """Take tokens out of some rows' laws."""
    known = [token for token in token_ids if token < rows.shape[1]]
    if of_rows and known:
        index = torch.tensor(of_rows, dtype=torch.long, device=rows.device)
        rows[index[:, None], torch.tensor(known, device=rows.device)] = -torch.inf


def _ban_sequences(rows: torch.Tensor, sequences: Sequence[tuple[int, ...]], history: History, tree: Tree) -> None:
    """Ban the last token of each sequence in the rows that follow the others."""
    reach = max((len(sequence) for sequence in sequences), default=1) - 1
    tails = _tails(history.token_ids[max(0, len(history.token_ids) - reach) :].tolist(), tree, reach)
    for *first, last in sequences:
        of_rows = [row for row, tail in enumerate(tails) if tail[len(tail) - len(first) :] == first]
        _ban(rows, of_rows, (last,))


def _tails(context: list[int], tree: Tree, reach: int) -> list[list[int]]:
    """Return, for each row, the last tokens before its own: at least the last `reach` of them, if there are so many."""
    tails = [context]
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        tails.append([*tails[parent + 1], token])
    return [tail[max(0, len(tail) - reach) :] for tail in tails]


def _penalise(rows: torch.Tensor, params: SamplingParams, history: History, tree: Tree) -> None:
    """Apply repetition (Keskar et al. 2019, CTRL), frequency and presence penalties (OpenAI), to the tokens that occur."""
    generated = history.token_ids[history.prompt_len :]
    occurring = history.token_ids if params.repetition_penalty != 1 else generated
    token_ids = np.unique(np.concatenate([occurring, tree.token_ids]))
    token_ids = token_ids[token_ids < rows.shape[1]]
    counts = np.zeros((len(rows), len(token_ids)), np.float32)  # [rows, tokens], of generated ones
    counts[0] = [np.count_nonzero(generated == token) for token in token_ids.tolist()]
    for node, parent in enumerate(tree.parents.tolist()):
        counts[node + 1] = counts[parent + 1]
        counts[node + 1, token_ids == tree.token_ids[node]] += 1
    index = torch.from_numpy(token_ids).long().to(rows.device)
    count = torch.from_numpy(counts).to(rows.device)
    seen = (count > 0) | torch.from_numpy(np.isin(token_ids, history.token_ids)).to(rows.device)
    values = rows[:, index]
    repeated = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = torch.where(seen, repeated, values)
    rows[:, index] = values - params.frequency_penalty * count - params.presence_penalty * (count > 0)
