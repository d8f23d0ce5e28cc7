"""vLLM's own drafter, called behind a step that specq has judged.

vLLM's runner calls it in `sample_tokens`, which is never reached. So it is called here, by the same method of the
runner, with the tokens of our judge. If the device knows them, nothing waits for the host. The drafter keeps its KV in
the blocks of the sessions. Each call computes the rows of the step, and drafts a chain for each session.

A call must not change what the next step starts from: the drafter counts lengths up in place (`_lengths_apart`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch

from specq.engines.vllm.patches.batch_state import BatchState
from specq.engines.vllm.patches.drafter_gaps import KnownTexts
from specq.engines.vllm.rows import said_tokens
from specq.engines.vllm.step_delta import StepDelta
from specq.protocol import EngineLostError, IntpArray
from specq.runtime import traced
from specq.verification import Judgements, StepBatch, ends_of, places_in_runs
from specq.verification.begun import Judging
from specq.verification.transfers import Fetched, to_device

log = structlog.get_logger(__name__)

PROPOSE = "propose_draft_token_ids"  # the method of vLLM's runner that calls its drafter
NUM_LEVELS = "num_spec_tokens_to_schedule"  # the key of vLLM's scheduler for how many tokens to draft, if it has one
# Not used: by the first one vLLM's next step would begin with the tokens that the drafter was given. The second one is
# for models with a recurrent state.
EVENTS = ("valid_sampled_token_count_event", "num_accepted_tokens_event")
NO_TOKEN = -1


class StepBehind(NamedTuple):
    """A step that vLLM has computed, behind which it drafts `levels` tokens.

    output: the runner's input. state: its `execute_model_state`. rows: i64[n], each session's row in its batch. firsts:
    i64[n], where the drafter's knowledge of each text begins.
    """

    batch: StepBatch
    output: Any
    state: Any
    rows: IntpArray
    firsts: IntpArray
    levels: int


class StepDrafter:
    """The drafter of `runner`, if it has one.

    - levels: how many tokens it drafts. 0: there is none.
    - judges: whether `draft` needs no judgements of the host where the device knows the tokens.
    """

    def __init__(self, runner: Any, batch_state: BatchState) -> None:
        self._runner, self._batch_state = runner, batch_state
        config = runner.speculative_config
        is_used = config is not None and config.method != "custom_class" and hasattr(runner, "drafter")
        self.levels: int = config.num_speculative_tokens if is_used else 0
        self._texts = KnownTexts(runner)
        self._most = getattr(runner, "effective_drafter_max_model_len", None) or runner.max_model_len
        for name in EVENTS if self.levels else ():
            setattr(runner, name, None)

    def behind(self, delta: StepDelta, names: Sequence[str], batch: StepBatch, output: Any) -> StepBehind | None:
        """Keep what the drafter needs of the step that the runner has just computed. None: it does not draft."""
        if self.levels:
            self._texts.meet(((names[place], int(batch.starts[place])) for place in delta.new), delta.ended)
        common = self._runner.execute_model_state.spec_decode_common_attn_metadata if self.levels else None
        if common is None or delta.drafts < 0 or common.max_seq_len + self.levels > self._most:
            return None
        firsts, levels = self._texts.follow(names, batch), min(delta.drafts, self.levels)
        return StepBehind(batch, output, self._runner.execute_model_state, self._batch_state.rows, firsts, levels)

    def draft(self, step: StepBehind, judging: Judging | Judgements) -> tuple[Judging | Judgements, Fetched | None]:
        """Let the drafter follow a step, and draft. Return its judgements, finished if it had to wait for them, and the
        drafts, i32[n, levels] on their way to the host.

        Drafts are hints: if vLLM's drafter raises an error, there are none from then on.
        """
        device, num = self._runner.device, self._runner.input_batch.num_reqs
        rows = step.rows[step.batch.is_judged]
        said = None if isinstance(judging, Judgements) else _said_there(judging, rows, num)
        if said is None:
            judging = judging if isinstance(judging, Judgements) else judging.finish()
            said = to_device(_said(judging, rows, num), device)
        try:
            drafted = self._propose(step, said)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self.levels = 0
            log.warning("vllm_drafter_failed", **traced(error))
            return judging, None
        if not step.levels or drafted is None:
            return judging, None
        in_order = drafted[to_device(step.rows, device), : step.levels]
        return judging, Fetched(in_order.to(torch.int32))

    def _propose(self, step: StepBehind, said: torch.Tensor) -> torch.Tensor | None:
        """Call vLLM's drafter. Return its tokens, [requests, any] on the device, in the order of vLLM's batch."""
        runner, state = self._runner, step.state
        if hasattr(step.output, NUM_LEVELS):
            setattr(step.output, NUM_LEVELS, step.levels)
        self._note_next(step)
        common, order = _lengths_apart(state.spec_decode_common_attn_metadata), step.rows.argsort()
        sizes = np.array([step.output.num_scheduled_tokens[name] for name in runner.input_batch.req_ids], np.intp)
        with self._texts.shortened(common, step.firsts[order], sizes):
            drafted = getattr(runner, PROPOSE)(
                step.output,
                said,
                runner.input_batch.sampling_metadata,
                state.hidden_states,
                state.sample_hidden_states,
                state.aux_hidden_states,
                state.spec_decode_metadata,
                common,
                state.slot_mappings,
            )
        return drafted if isinstance(drafted, torch.Tensor) else None

    def _note_next(self, step: StepBehind) -> None:
        """Let vLLM find the token behind each part of a prompt: it takes the last one that it knows of a request.

        The next step writes these numbers anew.
        """
        batch = step.batch
        if not batch.are_judged:
            parts = ~batch.is_judged
            self._runner.input_batch.num_tokens_no_spec[step.rows[parts]] = batch.base_lens[parts] + 1


def _lengths_apart(common: Any) -> Any:
    """Return vLLM's description of a batch with lengths of its own, which are those of the runner in the original."""
    found = copy.copy(common)
    for name, value in vars(common).items():
        if "seq_lens" in name and isinstance(value, torch.Tensor):
            setattr(found, name, value.clone())
    return found


def _said(judgements: Judgements, rows: IntpArray, num: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the tokens of a step as vLLM has them, i32[num, most]: by rows of its batch, then NO_TOKEN."""
    counts, tokens = said_tokens(judgements)
    found = np.full((num, int(counts.max(initial=1))), NO_TOKEN, np.int32)
    found[rows.repeat(counts), places_in_runs(counts)] = tokens
    return found


def _said_there(judging: Judging, rows: IntpArray, num: int) -> torch.Tensor | None:
    """Return the same on the device, if it chooses each row's own token; else None.

    A node is accepted if it is the own token of the row before it, and the node before it is accepted.
    """
    if judging.begun is None:
        return None
    own, batch = judging.begun.own.tokens, judging.judged
    counts = batch.num_nodes + 1
    most = int(counts.max(initial=1))
    found = torch.full((num, most), NO_TOKEN, dtype=torch.int32, device=own.device)
    at = np.arange(most).clip(max=batch.num_nodes[:, None]) + (ends_of(counts) - counts)[:, None]
    said = own[to_device(at, own.device)]  # [judged, most]
    if most > 1:
        nodes = np.full((len(batch), most), NO_TOKEN, np.int32)
        nodes[:, 0] = 0
        nodes[np.arange(len(batch)).repeat(batch.num_nodes), 1 + places_in_runs(batch.num_nodes)] = batch.node_tokens
        there = to_device(nodes, own.device)
        accepted = torch.cat([there[:, :1] >= 0, said[:, :-1] == there[:, 1:]], 1).int().cumprod(1) > 0
        said = torch.where(accepted, said, NO_TOKEN)
    found[to_device(rows, own.device)] = said
    return found
