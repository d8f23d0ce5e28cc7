"""A session at the verifier: what is committed, and the tree of unverified draft nodes that hangs from it.

Rules: only `commit` changes the transcript. State lives here and nowhere else; no I/O, no clock, no model. How drafts come onto
the tree is in `specq.verifier.grafting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from specq.drafting import Calibration, judged
from specq.protocol import (
    NO_SCRATCH,
    History,
    LogprobRecord,
    Open,
    SamplingParams,
    ScratchRows,
    SessionStats,
    Speculation,
)
from specq.text import StopMatcher
from specq.verification import strategy
from specq.verifier.draft_tree import Chain, Node, in_order
from specq.verifier.history import Past
from specq.verifier.lanes import MANY_IDS, Lane

SYNC_PATIENCE = 3  # heartbeats


class Session:
    """One open session. `limit` is the committed length at which it ends, `end_ids` the tokens that end it sooner."""

    def __init__(
        self, message: Open, end_ids: tuple[int, ...] = (), sampled_calibration: Calibration | None = None
    ) -> None:
        self.session_id, self.epoch = message.session_id, message.epoch
        self.params: SamplingParams = message.params
        rule = strategy(message.params.strategy)
        self.takes_distributions = rule.samples_drafts(message.params)  # draft nodes may be sampled; else point masses
        self.prompt_len, self.end_ids = message.prompt_len, end_ids
        self.token_ids: list[int] = message.token_ids.tolist()
        self._past = Past(message.params, message.prompt_len, end_ids)
        self.limit = len(self.token_ids) + message.tokens_left
        self.journaled = len(self.token_ids)  # what the broker has confirmed
        self.logprobs = LogprobRecord(message.params.logprobs)  # of the tokens from opened_len on
        self.opened_len = len(self.token_ids)
        self.sampled_calibration = sampled_calibration or Calibration()  # one for all sessions of a verifier
        self.stop_matcher: StopMatcher | None = None  # of the job's stop strings
        self.finish = ""  # the finish reason, once there is one
        self.kv_len = 0
        self.is_open = False  # in the engine
        self.roots: dict[int, Node] = {}
        self.lanes: dict[int, Lane] = {}
        self.num_live = 0  # nodes on the tree
        self.chain: Chain | None = None  # instead of a tree: what the colocated drafter offers for the next step
        self.scratch: ScratchRows = NO_SCRATCH  # what a source wants computed beside the next token
        self.speculation: Speculation = message.speculation
        self.is_sync = message.speculation.mode == "sync"
        self.committed_at = 0.0  # when the last round was; 0 before the first
        self.answered = 0  # the newest committed length that a remote drafter has been seen to know
        self.drafted_at = 0  # the newest position that a draft spoke of
        self.beats_waited = 0  # heartbeats since a synchronous session began to wait for a draft
        self.stats = SessionStats()

    @property
    def awaits_draft(self) -> bool:
        """Whether a synchronous session is between rounds: it takes part in no step until its drafter has answered, or has
        been silent for too long."""
        between = self.is_sync and self.num_pending <= 1 and self.drafted_at < self.length < self.limit - 1
        return between and self.beats_waited < SYNC_PATIENCE

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not there yet; 1 for a decoding session."""
        return self.length - self.kv_len

    def history(self) -> History | None:
        """Return what judging needs of the past, if the parameters ask for it."""
        return self._past.history(self.token_ids)

    # --- drafts -----------------------------------------------------------------------------------------------------

    def note_draft(self, base_len: int, num_nodes: int) -> None:
        """Note that a draft arrived, which speaks of this position; it takes the place of an offered chain."""
        self.chain = None
        self.stats.drafted += num_nodes
        self.drafted_at, self.beats_waited = max(self.drafted_at, base_len), 0

    def offer(self, chain: Chain) -> None:
        """Take a chain of the colocated drafter for the next step; there must be no tree."""
        assert not self.num_live
        self.chain = chain
        self.stats.drafted += len(chain.token_ids)
        self.drafted_at, self.beats_waited = self.length, 0

    def forget_drafts(self) -> None:
        """Drop all that was drafted, and what is known of drafters; that costs speed only."""
        self.chain, self.roots, self.lanes, self.num_live = None, {}, {}, 0

    # --- what to verify ---------------------------------------------------------------------------------------------

    def candidates(self, floor: float) -> list[Node]:
        """Return live nodes with a cumulative acceptance probability of at least `floor`, with `reach_prob` and `depends_on`
        set: parents before children, siblings in the order of judgement, and none likelier than its parent, and no sampled node
        likelier than its earlier sibling. So what a node depends on is returned with it, unless that is too unlikely."""
        found: list[Node] = []
        level: list[tuple[float, dict[int, Node], Node | None]] = [(1.0, self.roots, None)]
        while level:
            following = []
            for reach_prob, siblings, above in level:
                last = above
                for node in self._weighed(siblings, reach_prob):
                    node.depends_on = last
                    last = last if node.distribution is None else node
                    if node.reach_prob >= floor:
                        found.append(node)
                        following.append((node.reach_prob, node.children, last))
            level = following
        return found

    def _weighed(self, siblings: dict[int, Node], reach_prob: float) -> list[Node]:
        """Set the `reach_prob` of siblings whose parent has this one; return them in the order of judgement."""
        nodes = in_order(siblings.values())
        most = left = reach_prob
        for node in nodes:
            node.reach_prob = left * self.lanes[node.lane].calibration.probability(node.score)
            if node.distribution is not None:
                most = node.reach_prob = min(most, node.reach_prob)
                left -= node.reach_prob
        return nodes

    def live_nodes(self) -> Iterator[Node]:
        """Yield the live nodes, parents first."""
        level = list(self.roots.values())
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def count_round(self, nodes: Sequence[Node], accepted: AbstractSet[int]) -> None:
        """Count a round before its `commit`; `accepted` holds the indices of the accepted among the verified nodes.

        Lanes of sampled drafts learn here, from the nodes that were judged; other lanes learn in `commit`.
        """
        if self.num_live:
            self.stats.hits += 1
        else:
            self.stats.misses += 1
        if nodes:
            self.stats.count_tree(nodes, self.length)
        for i, node in enumerate(nodes):
            self.stats.count_node(node.position - self.length + 1, i in accepted)
        for i in judged(nodes, accepted) if self.takes_distributions else ():
            self.lanes[nodes[i].lane].calibration.observe(nodes[i].score, i in accepted)
            if nodes[i].distribution is not None:
                self.sampled_calibration.observe(nodes[i].predicted, i in accepted)

    def count_chain_round(self, num_verified: int, num_accepted: int) -> None:
        """Count a round that verified this many nodes of the offered chain, as `count_round` does."""
        self.stats.hits += 1
        self.stats.count_chain(num_verified, num_accepted)

    def commit(self, tokens: Sequence[int], num_verified: int) -> None:
        """Append tokens to the transcript; the branch that agrees with them lives on, everything else is cut."""
        self.chain = None
        if not self.roots:
            self.token_ids.extend(tokens)
            return
        num_gone = self._move_root(tokens)
        self.token_ids.extend(tokens)
        self.stats.stale += max(0, num_gone - num_verified)
        self.num_live -= num_gone
        for lane in self.lanes.values():
            if len(lane.node_table) > MANY_IDS:
                lane.prune(self.length)

    def _move_root(self, tokens: Sequence[int]) -> int:
        """Follow committed tokens down the tree; return how many nodes are no longer live.

        Lanes learn from every node whose parent is on the path, verified or not: it was accepted iff its token is the one that
        was committed there. So a node need not be verified for its lane to be calibrated.
        """
        num_gone, siblings, lanes_learn = 0, self.roots, not self.takes_distributions
        for token in tokens:
            follower = None
            for node in siblings.values():
                is_accepted = node.token == token
                if lanes_learn:
                    self.lanes[node.lane].calibration.observe(node.score, is_accepted)
                if is_accepted:
                    follower, node.stands = node, node.position + 1
                    num_gone += 1
                else:
                    num_gone += node.cut()
            siblings = follower.children if follower is not None else {}
        self.roots = siblings
        for node in siblings.values():
            node.parent = None
        return num_gone

    def up_to_end(self, token_ids: list[int]) -> tuple[int, str]:
        """Return how many tokens there are up to the first that ends the text, and the finish reason or "". A stop string's
        matcher takes in the tokens: call it once for each round."""
        room = self.limit - self.length
        tokens = token_ids[:room]
        num_kept = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), None)
        if self.stop_matcher is not None:
            stopped = self.stop_matcher.push(tokens[:num_kept])
            num_kept = num_kept if stopped is None else stopped + 1
        if num_kept is not None:
            return num_kept, "stop"
        return len(tokens), "length" if len(tokens) >= room else ""

    def seen(self) -> tuple[int, ...]:
        """Return (lane, newest node id seen, lane, ...), as a verdict carries it."""
        return tuple(value for lane_id, lane in self.lanes.items() for value in (lane_id, lane.seen))
