"""vLLM's scheduler, driven from outside: who shares a step, and with how many tokens, is the verifier's plan.

vLLM's own `schedule` and `update_from_output` are never called. What is used of it is its KV cache manager and its
messages to the workers. A request is never preempted: what does not fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from specq.engines.vllm.room import free_slots


@dataclass(slots=True)
class Holding:
    """A request, and what the workers know of it.

    num_sent   blocks of each KV group that they know of; None: they do not know the request
    """

    request: Request
    num_sent: list[int] | None = None


@dataclass(slots=True)
class Grant:
    """A request's part in a step: `num_tokens` tokens from where its KV ends, then drafted ones."""

    holding: Holding
    num_tokens: int
    draft: list[int] = field(default_factory=list)


class SessionScheduler(Scheduler):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """See the module. EngineCore makes it, as it would make vLLM's own."""

    def hold(self, request: Request) -> Holding:
        """Take in a request; share the cached blocks of its prompt, but for the last token, and keep them."""
        request.status = RequestStatus.RUNNING  # of those that wait, vLLM keeps some room back
        blocks, num_cached, *_ = self.kv_cache_manager.get_computed_blocks(request)
        if num_cached and self.kv_cache_manager.allocate_slots(request, 1, num_cached, blocks) is not None:
            request.num_computed_tokens = num_cached
        return Holding(request)

    def drop(self, holding: Holding) -> None:
        """Free a request's KV; its whole blocks stay cached until others need them."""
        self.kv_cache_manager.free(holding.request)
        self.finished_req_ids.add(holding.request.request_id)

    def free_slots(self, holdings: Sequence[Holding]) -> int:
        """Return how many tokens fit besides those of the requests held, however they are divided among these."""
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks() // self.kv_cache_manager.num_kv_cache_groups
        slacks = [self._slack(holding.request) for holding in holdings]
        return free_slots(num_free, self.block_size, slacks)

    def _slack(self, request: Request) -> int:
        """Return how many more tokens fit into the request's blocks."""
        num_blocks = min(map(len, self.kv_cache_manager.get_block_ids(request.request_id)))
        return int(num_blocks * self.block_size - request.num_computed_tokens)

    def output(self, grants: Sequence[Grant]) -> SchedulerOutput:
        """Take the KV that the grants need, which must be free, and return what the workers have to know of the step."""
        known, delta = CachedRequestData.make_empty(), list[NewRequestData]()
        for grant in grants:
            allocated = self.kv_cache_manager.allocate_slots(grant.holding.request, grant.num_tokens + len(grant.draft))
            assert allocated is not None
            self._tell(grant.holding, known, delta)
        counts = {_id(grant): grant.num_tokens + len(grant.draft) for grant in grants}
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = delta, known
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, sum(counts.values())
        output.scheduled_spec_decode_tokens = {_id(grant): grant.draft for grant in grants if grant.draft}
        output.num_common_prefix_blocks = [0] * self.kv_cache_manager.num_kv_cache_groups
        output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        output.finished_req_ids = self.finished_req_ids.copy()
        self.finished_req_ids.clear()
        return output

    def _tell(self, holding: Holding, known: CachedRequestData, delta: list[NewRequestData]) -> None:
        """Add what the workers do not know yet of a request's blocks and place."""
        request = holding.request
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        sent, holding.num_sent = holding.num_sent, [len(ids) for ids in block_ids]
        if sent is None:
            delta.append(NewRequestData.from_request(request, block_ids))
            return
        fresh: tuple[list[int], ...] = tuple(ids[count:] for ids, count in zip(block_ids, sent, strict=True))
        known.req_ids.append(request.request_id)
        known.new_block_ids.append(fresh if any(fresh) else None)
        known.num_computed_tokens.append(request.num_computed_tokens)
        known.num_output_tokens.append(request.num_output_tokens)


def _id(grant: Grant) -> Any:
    return grant.holding.request.request_id
