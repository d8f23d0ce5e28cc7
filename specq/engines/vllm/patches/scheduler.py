"""vLLM's scheduler, driven from outside: who shares a step, and with how many tokens, is the verifier's plan.

vLLM's own `schedule` and `update_from_output` are never called. What is used of it is its KV cache manager. A request
is never preempted: what does not fit is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from specq.engines.vllm.step_delta import StepDelta
from specq.protocol import SamplingParams as JobParams


@dataclass(slots=True)
class Holding:
    """A request, and what the workers and the request itself know.

    num_sent   blocks of each KV group that the workers know of; None: they do not know the request
    params     those of the session, which the workers know; None: they know none
    """

    request: Request
    num_sent: list[int] | None = None
    params: JobParams | None = None

    def tell(self, unsaid: list[int]) -> None:
        """Tell the request the tokens of its transcript that it was not told yet."""
        if unsaid:
            self.request.append_output_token_ids(unsaid)

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
        return int(min(map(len, self.kv_cache_manager.get_blocks(holding.request.request_id).blocks)) * self.block_size)

    def allocate(self, holding: Holding, unsaid: list[int], num_computed: int, num_tokens: int) -> None:
        """Take the KV that so many more tokens of a request need, which must be free; its full blocks are cached.
        `unsaid`: see `Holding.tell`."""
        holding.tell(unsaid)
        holding.request.num_computed_tokens = num_computed
        allocated = self.kv_cache_manager.allocate_slots(holding.request, num_tokens)
        assert allocated is not None

    def announce(self, delta: StepDelta, holdings: Sequence[Holding], has_grown: Sequence[int]) -> None:
        """Write into a delta what the workers do not know yet of its requests' blocks, and which requests have ended;
        `has_grown`: places of the requests that have new blocks, or are new themselves."""
        for i in has_grown:
            holding = holdings[i]
            block_ids = self.kv_cache_manager.get_block_ids(holding.request.request_id)
            sent, holding.num_sent = holding.num_sent, [len(ids) for ids in block_ids]
            if sent is None:
                delta.new[i] = NewRequestData.from_request(holding.request, block_ids)
            else:
                delta.blocks[i] = tuple(ids[count:] for ids, count in zip(block_ids, sent, strict=True))
        delta.zeroed = self._get_new_block_ids_to_zero()
        if self.finished_req_ids:
            delta.ended = [*self.finished_req_ids]
            self.finished_req_ids.clear()
