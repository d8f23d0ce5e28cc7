"""A session at the verifier: what is committed, and the tree of unverified draft nodes that hangs from it.

Rules: drafts are hints, aligned by content. A draft may speak of a position that has been passed (what the transcript
agrees with survives), of nodes that were never seen (dropped as orphans) or that were cut (dropped as stale); it may come
twice. None of that is an error. Only `commit` changes the transcript.

State lives here and nowhere else; no I/O, no clock, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from specq.drafting import Calibration, judged
from specq.proposers import NgramIndex
from specq.protocol import (
    LOOKUP_LANE,
    Draft,
    DraftDistribution,
    History,
    LogprobRecord,
    Open,
    SamplingParams,
    SessionStats,
    Speculation,
    claims_of,
    distributions_of,
)
from specq.verification import strategy
from specq.verifier.draft_tree import Chain, Node, in_order
from specq.verifier.history import Past
from specq.verifier.lanes import MANY_NAMES, Lane
from specq.verifier.lookup_budget import LOOKUP_RARITY, lookup_tokens, num_likely_enough

MAX_LIVE_NODES = 512  # of one session; what comes beyond is dropped
MAX_LANES = 8
SYNC_PATIENCE = 3  # heartbeats


class Session:
    """One open session. `limit` is the committed length at which it ends, `end_ids` the tokens that end it sooner."""

    def __init__(
        self, message: Open, end_ids: tuple[int, ...] = (), acceptance_stats: Calibration | None = None
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
        self.acceptance_stats = acceptance_stats or Calibration()  # of sampled nodes, in all sessions of a verifier
        self.finish = ""  # the finish reason, once there is one
        self.kv_len = 0
        self.is_open = False  # in the engine
        self.roots: dict[int, Node] = {}
        self.lanes: dict[int, Lane] = {}
        self.num_live = 0  # nodes on the tree
        self.chain: Chain | None = None  # instead of a tree: what the verifier's own drafter offers for the next step
        self.speculation: Speculation = message.speculation
        self.is_sync = message.speculation.mode == "sync"
        self.max_lookup = lookup_tokens(message.speculation) if rule.uses_drafts else 0
        self.ngrams = NgramIndex(self.token_ids)
        self._declined = 0
        self.drafted_at = 0  # the newest position that a draft spoke of
        self.beats_waited = 0  # heartbeats since a synchronous session began to wait for a draft
        self.stats = SessionStats()

    @property
    def awaits_draft(self) -> bool:
        """Whether a synchronous session is between rounds: it sits out steps until its drafter has answered, or has not
        for so long that it is taken for gone."""
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

    def graft(self, draft: Draft, now: float) -> int:
        """Hang the draft's nodes onto the tree; return how many of them are live. Never raises for its content. A draft with
        laws that would not fit is dropped as a whole: what is dropped must not depend on its tokens."""
        lane = self._lane(draft.lane)
        if lane is None:
            return 0
        self.chain = None
        before, seen = self.num_live, lane.seen
        self.stats.drafted += len(draft.token_ids)
        self.drafted_at, self.beats_waited = max(self.drafted_at, draft.base_len), 0
        lane.seen = max(seen, draft.first_id + len(draft.token_ids) - 1)
        is_too_much = draft.q_size and before + len(draft.token_ids) > MAX_LIVE_NODES
        if is_too_much or not lane.has_room(len(draft.token_ids), self.length):
            self.stats.stale += len(draft.token_ids)
            return 0
        scores = claims_of(draft) if self.takes_distributions else draft.scores.tolist()
        rows = zip(draft.token_ids.tolist(), draft.parent_ids.tolist(), scores, distributions_of(draft), strict=True)
        for rank, (token, parent_id, score, distribution) in enumerate(rows):
            node_id = draft.first_id + rank
            at = draft.base_len if parent_id < 0 else lane.find(parent_id)
            if node_id in lane.names:
                continue
            if at is None or (isinstance(at, int) and at > self.length):
                self._drop(stale=parent_id <= seen or parent_id >= draft.first_id)
            elif isinstance(at, int) and at < self.length:
                self._confirm(lane, node_id, token, at)
            else:
                parent = None if isinstance(at, int) else at
                self._attach(
                    Node(draft.lane, node_id, token, parent, self._below(parent), score, now), distribution, rank
                )
        return self.num_live - before

    def offer(self, chain: Chain) -> None:
        """Take a chain of the verifier's own drafter for the next step; there must be no tree."""
        assert not self.num_live
        self.chain = chain
        self.stats.drafted += len(chain.token_ids)
        self.drafted_at, self.beats_waited = self.length, 0

    def forget_drafts(self) -> None:
        """Let go of all that was drafted, and of what is known of drafters; speed is all that it costs."""
        self.chain, self.roots, self.lanes, self.num_live = None, {}, {}, 0

    def _lane(self, lane_id: int) -> Lane | None:
        """Return a lane; a new one takes the place of the oldest without live nodes if there are too many."""
        if lane_id not in self.lanes and len(self.lanes) >= MAX_LANES:
            idle = [i for i, lane in self.lanes.items() if not any(isinstance(lane.find(n), Node) for n in lane.names)]
            if not idle:
                return None
            del self.lanes[idle[0]]
        return self.lanes.setdefault(lane_id, Lane())

    def fill(self, min_accept_prob: float, now: float) -> int:
        """Draft a chain from what the text itself repeats, if drafters have sent nothing that is live; return how many
        nodes it has. It is as long as its nodes are worth verifying, by what came of earlier ones: see `Verdict.worth`."""
        room = min(self.max_lookup, self.limit - self.length - 1)
        if self.num_live or self.chain is not None or room < 1:
            return 0
        tokens, score = self.ngrams.chain(room)
        lane = self._lane(LOOKUP_LANE)
        if not tokens or lane is None:
            return 0
        count = num_likely_enough(lane.calibration.probability(score), min_accept_prob)
        if not count:
            self._declined = (self._declined + 1) % LOOKUP_RARITY
            count = not self._declined
        for i, token in enumerate(tokens[:count]):
            parent = lane.names[lane.seen] if i else None
            lane.seen += 1
            self.stats.drafted += 1
            parent = parent if isinstance(parent, Node) else None
            self._attach(Node(LOOKUP_LANE, lane.seen, token, parent, self.length + i, score, now), None, 0)
        return self.num_live

    def _below(self, parent: Node | None) -> int:
        return self.length if parent is None else parent.position + 1

    def _confirm(self, lane: Lane, node_id: int, token: int, at: int) -> None:
        """Take in a node for a position that has been passed: it stands confirmed if it is what was committed."""
        if self.token_ids[at] == token:
            lane.names[node_id] = at + 1
        else:
            self._drop(stale=True)

    def _attach(self, fresh: Node, distribution: DraftDistribution | None, rank: int) -> None:
        """Hang a node onto the tree, or onto the one that bears its token already.

        A position has one sampled family, the first that came; what is sampled there later counts as point masses, which
        is exact whatever they are. A sampled node takes the place of a point mass with its token.
        """
        siblings = self.roots if fresh.parent is None else fresh.parent.children
        node = siblings.get(fresh.token)
        if node is None:
            if self.num_live >= MAX_LIVE_NODES:
                return
            node = siblings[fresh.token] = fresh
            self.num_live += 1
        self.lanes[fresh.lane].names[fresh.node_id] = node
        if (
            distribution is not None
            and self.takes_distributions
            and all(other.distribution in (None, distribution) for other in siblings.values())
        ):
            node.draw(distribution, rank, fresh, self.acceptance_stats.probability(fresh.score))

    def _drop(self, *, stale: bool) -> None:
        if stale:
            self.stats.stale += 1
        else:
            self.stats.orphans += 1

    # --- what to verify ---------------------------------------------------------------------------------------------

    def candidates(self, floor: float) -> list[Node]:
        """Return live nodes whose estimated chance of acceptance is at least `floor`, with `reach` and `depends_on` set:
        parents before children, siblings in the order of judgement, and none likelier than its parent or its elder sampled
        sibling. So what a node depends on comes before it, and is at least as likely."""
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
        """Set the reach of siblings whose parent has this one; return them in the order of judgement. Point masses are no
        likelier than sampled siblings either: one that a sibling drew is not there, which must decide nothing before."""
        nodes = in_order(siblings.values())
        most = left = reach_prob
        for node in nodes:
            chance = self.lanes[node.lane].calibration.probability(node.score)
            node.reach_prob = min(most, left * chance)
            if node.distribution is not None:
                most = node.reach_prob
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

        Lanes of sampled drafts learn here, from the nodes that were judged; others in `commit`.
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
                self.acceptance_stats.observe(nodes[i].claim, i in accepted)

    def count_chain_round(self, num_verified: int, num_accepted: int) -> None:
        """Count a round that verified so many nodes of the offered chain, as `count_round` does."""
        self.stats.hits += 1
        self.stats.count_chain(num_verified, num_accepted)

    def commit(self, tokens: Sequence[int], num_verified: int) -> None:
        """Append tokens to the transcript; the branch that agrees with them lives on, everything else is cut.

        Lanes learn from every node whose parent is on the path, verified or not: it was right iff it is what was
        committed there. So a node need not be verified for its lane to be judged.
        """
        self.chain = None
        if not self.roots:
            self.token_ids.extend(tokens)
            return
        num_gone, siblings = 0, self.roots
        for token in tokens:
            follower = None
            for node in siblings.values():
                is_right = node.token == token
                if not self.takes_distributions:
                    self.lanes[node.lane].calibration.observe(node.score, is_right)
                if is_right:
                    follower, node.stands = node, node.position + 1
                    num_gone += 1
                else:
                    num_gone += node.cut()
            siblings = follower.children if follower is not None else {}
        self.token_ids.extend(tokens)
        self.roots = siblings
        for node in siblings.values():
            node.parent = None
        self.stats.stale += max(0, num_gone - num_verified)
        self.num_live -= num_gone
        self._forget()

    def _forget(self) -> None:
        """Forget names that say nothing any more, once there are many."""
        for lane in self.lanes.values():
            if len(lane.names) > MANY_NAMES:
                lane.forget(self.length)

    def seen(self) -> tuple[int, ...]:
        """Return (lane, newest node id seen, lane, ...), as a verdict carries it."""
        return tuple(value for lane_id, lane in self.lanes.items() for value in (lane_id, lane.seen))
