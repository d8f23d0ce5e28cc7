"""vLLM's scheduler, driven from outside: the verifier plans a step's requests, and their tokens.

vLLM's own `schedule` and `update_from_output` are never called. specq uses only its KV cache manager. A request is
never preempted. A step that does not fit is refused before any state changes.
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

    - num_sent: blocks of each KV group that the workers know. None: they do not know the request.
    - params: the session's parameters that the workers know; None: none.
    """

    request: Request
    num_sent: list[int] | None = None
    params: JobParams | None = None

    def tell(self, unsaid: list[int]) -> None:
        """Pass to the request the tokens of its transcript that it has not received yet."""
        if unsaid:
            self.request.append_output_token_ids(unsaid)

    def has_news(self, params: JobParams) -> bool:
        """Record that the workers know these session parameters; return whether they must be sent."""
        is_known, self.params = self.params is params, params
        return not is_known


class SessionScheduler(Scheduler):  # type: ignore[misc]  # vLLM has no types if it is not installed
    """See the module. EngineCore makes it, as it would make vLLM's own."""

    def hold(self, request: Request) -> Holding:
        """Add a request. Share and keep the cached blocks of its prompt, except for the last token."""
        request.status = RequestStatus.RUNNING  # vLLM reserves some room from waiting requests
        blocks, num_cached, *_ = self.kv_cache_manager.get_computed_blocks(request)
        if num_cached and self.kv_cache_manager.allocate_slots(request, 1, num_cached, blocks) is not None:
            request.num_computed_tokens = num_cached
        return Holding(request)

    def drop(self, holding: Holding, unsaid: list[int], num_computed: int) -> None:
        """Free a request's KV. Its whole blocks stay cached until other requests need them.

        `unsaid`: see `Holding.tell`. num_computed: tokens that have KV, also in steps in flight.
        """
        holding.tell(unsaid)
        self.kv_cache_manager.cache_blocks(holding.request, min(num_computed, holding.request.num_tokens))
        self.kv_cache_manager.free(holding.request)
        self.finished_req_ids.add(holding.request.request_id)

    @property
    def num_free(self) -> int:
        """Free blocks in each KV group, including blocks that only hold cached prefixes."""
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks() // self.kv_cache_manager.num_kv_cache_groups)

    def room(self, holding: Holding) -> int:
        """Return how many tokens fit into the request's blocks."""
        return int(min(map(len, self.kv_cache_manager.get_blocks(holding.request.request_id).blocks)) * self.block_size)

    def allocate(
        self, holding: Holding, unsaid: list[int], num_computed: int, num_tokens: int, num_ahead: int = 0
    ) -> None:
        """Allocate the KV that `num_tokens` more tokens of a request need, which must be free.

        Its full blocks are cached. `unsaid`: see `Holding.tell`. num_ahead: tokens of later steps that get KV, too.
        """
        holding.tell(unsaid)
        holding.request.num_computed_tokens = num_computed
        allocated = self.kv_cache_manager.allocate_slots(holding.request, num_tokens, num_lookahead_tokens=num_ahead)
        assert allocated is not None

    def announce(self, delta: StepDelta, holdings: Sequence[Holding], has_grown: Sequence[int]) -> None:
        """Write into a delta the blocks that are new to the workers, and ended requests.

        `has_grown`: places of the requests that have new blocks, or are new.
        """
        for i in has_grown:
            holding = holdings[i]
            groups = self.kv_cache_manager.get_blocks(holding.request.request_id).blocks
            is_new, sent = holding.num_sent is None, holding.num_sent or [0] * len(groups)
            holding.num_sent = [len(blocks) for blocks in groups]
            block_ids = tuple(
                [block.block_id for block in blocks[count:]] for blocks, count in zip(groups, sent, strict=True)
            )
            if is_new:
                delta.new[i] = NewRequestData.from_request(holding.request, block_ids)
            else:
                delta.blocks[i] = block_ids
        delta.zeroed = self._get_new_block_ids_to_zero()
        if self.finished_req_ids:
            delta.ended = [*self.finished_req_ids]
            self.finished_req_ids.clear()
