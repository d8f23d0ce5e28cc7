"""vLLM's scheduler, driven from outside: who shares a step, and with how many tokens, is the verifier's plan.

vLLM's own `schedule` and `update_from_output` are never called. What is used of it is its KV cache manager and its
messages to the workers. A request is never preempted: what does not fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from specq.protocol import IntpArray
from specq.protocol import SamplingParams as JobParams


@dataclass(slots=True)
class Holding:
    """A request, and what the workers and the request itself know.

    num_sent   blocks of each KV group that the workers know of; None: they do not know the request
    unsaid     tokens of its transcript that the request was not told yet: it is told where it needs blocks
    params     those of the session, which the workers know; None: they know none
    """

    request: Request
    num_sent: list[int] | None = None
    unsaid: list[int] = field(default_factory=list)
    params: JobParams | None = None

    def tell(self) -> None:
        """Tell the request its whole transcript."""
        if self.unsaid:
            self.request.append_output_token_ids(self.unsaid)
            self.unsaid = []

    def has_news(self, params: JobParams) -> bool:
        """Note that the workers know these parameters of the session; return whether they have to be told."""
        is_known, self.params = self.params is params, params
        return not is_known


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

    @property
    def num_free(self) -> int:
        """Blocks that are free in each KV group, those that only hold cached prefixes included."""
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks() // self.kv_cache_manager.num_kv_cache_groups)

    def room(self, holding: Holding) -> int:
        """Return how many tokens fit into the request's blocks."""
        return int(min(map(len, self.kv_cache_manager.get_block_ids(holding.request.request_id))) * self.block_size)

    def allocate(self, holding: Holding, num_computed: int, num_tokens: int) -> None:
        """Take the KV that so many more tokens of a request need, which must be free; its full blocks are cached."""
        holding.tell()
        holding.request.num_computed_tokens = num_computed
        allocated = self.kv_cache_manager.allocate_slots(holding.request, num_tokens)
        assert allocated is not None

    def output(
        self,
        holdings: Sequence[Holding],
        sizes: IntpArray,
        computed: IntpArray,
        num_said: IntpArray,
        has_grown: Sequence[int],
        chains: Mapping[str, list[int]],
    ) -> SchedulerOutput:
        """Return what the workers have to know of a step of n requests.

        sizes      i64[n]: tokens and nodes of each; computed i64[n]: where its KV ends; num_said i64[n]: tokens behind its prompt
        has_grown  places among the n of those that have new blocks, or are new themselves
        chains     drafted tokens, by the ids of requests that have some
        """
        request_ids = [holding.request.request_id for holding in holdings]
        fresh: list[Any] = [None] * len(holdings)
        delta, new = list[NewRequestData](), set[int]()
        for i in has_grown:
            holding = holdings[i]
            block_ids = self.kv_cache_manager.get_block_ids(request_ids[i])
            sent, holding.num_sent = holding.num_sent, [len(ids) for ids in block_ids]
            if sent is None:
                delta.append(NewRequestData.from_request(holding.request, block_ids))
                new.add(i)
            else:
                fresh[i] = tuple(ids[count:] for ids, count in zip(block_ids, sent, strict=True))
        known = CachedRequestData.make_empty()
        known.req_ids, known.new_block_ids = request_ids, fresh
        known.num_computed_tokens, known.num_output_tokens = computed.tolist(), num_said.tolist()
        if new:
            kept = [i for i in range(len(holdings)) if i not in new]
            for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
                setattr(known, name, [getattr(known, name)[i] for i in kept])
        counts = dict(zip(request_ids, sizes.tolist(), strict=True))
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = delta, known
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, int(sizes.sum())
        output.scheduled_spec_decode_tokens = dict(chains)
        output.num_common_prefix_blocks = [0] * self.kv_cache_manager.num_kv_cache_groups
        output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        output.finished_req_ids = self.finished_req_ids.copy()
        self.finished_req_ids.clear()
        return output
