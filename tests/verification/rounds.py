"""The exact distribution of what rounds commit, by enumeration of everything that a drafter may draw.

Nothing is sampled. Each outcome of the drafter's draws is grafted onto a real `Session`, the real scheduler chooses
what is verified, and a naive judge says how likely each text is then. What the rounds leave unsaid is completed with
the target's own distribution: the sum over all outcomes must be the target's distribution of texts.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specq.drafting.grammar.source import ForcedTokens
from specq.grammar import SessionGrammar
from specq.protocol.draft_checks import pack_distributions
from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import DraftDistribution
from specq.verifier.sessions.grafting import graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.step.plan import plan
from specq.verifier.trees import DraftTrees
from tests.verifier.sessions import commit, graft

CONTEXT = (0,)
TARGET, DRAFT, SCORE, SHAPE, POINT = range(5)  # what random functions of a context say
POINT_LANE, FIRST_LANE = 7, 0
TREES = DraftTrees()  # of all sessions; the reference where bugs are planted


@lru_cache(100_000)
def normals(entropy, what, prefix, count):
    """Standard normal numbers, a function of the tokens so far."""
    return rng_of(entropy, *what, *prefix).normal(0, 1, count)


def rng_of(entropy, *what):
    return np.random.default_rng([entropy, *what])


@dataclass(frozen=True)
class World:
    """A target and drafters that are random functions of the tokens so far.

    score       what a drafter says of a node: "honest" (known before the draw), "own" (the log of the token's own
                probability) or "any" (an arbitrary function of the token)
    group      most siblings of a drafter; depth: levels of its nodes; `widths` says how many siblings each level has
                instead; num_lanes: drafters that draw
    num_points  point masses below each node of the first levels; they come before what is drawn if `points_first`
    chosen      levels from the context on whose nodes drafters do not draw: they are point masses, with drawn ones
                below
    """

    entropy: int
    vocab: int = 3
    sibling_group: int = 2
    depth: int = 2
    widths: tuple[int, ...] = ()
    num_lanes: int = 1
    num_points: int = 0
    points_first: bool = True
    chosen: int = 0
    score: str = "own"
    sharpness: float = 1.5

    def target(self, prefix):
        """f64[vocab]: the target's distribution after these tokens."""
        weights = np.exp(1.5 * normals(self.entropy, (TARGET,), prefix, self.vocab))
        return weights / weights.sum()

    def distribution(self, lane, prefix):
        """What a drafter's children are drawn from after these tokens."""
        logits = self.sharpness * normals(self.entropy, (DRAFT, lane), prefix, self.vocab)
        weights = np.exp(logits - logits.max()) * 65535
        return DraftDistribution(np.arange(self.vocab, dtype=np.int32), np.maximum(weights, 1).astype(np.uint16))

    def num_children(self, lane, prefix):
        """How many siblings are drawn after these tokens, a function of the tokens."""
        if self.widths:
            return self.widths[len(prefix)] if len(prefix) < len(self.widths) else 0
        if len(prefix) >= self.depth:
            return 0
        low = 1 if not prefix else 0
        return int(rng_of(self.entropy, SHAPE, lane, *prefix).integers(low, self.sibling_group + 1))

    def points(self, prefix):
        """Point masses below these tokens."""
        count = self.num_points if len(prefix) < 2 else 0
        return rng_of(self.entropy, POINT, *prefix).permutation(self.vocab)[:count].tolist()

    def scores_of(self, lane, prefix, drawn, distribution):
        """What a drafter says of siblings; `drawn` are their tokens, in order."""
        found, left = [], distribution.weights.astype(float)
        for token in drawn:
            share = left / left.sum()
            known = float(rng_of(self.entropy, SCORE, lane, *prefix, token).random()) * 0.98 + 0.01
            found.append({"honest": float((share**2).sum()), "own": share[token], "any": known}[self.score])
            left[token] = 0
        return np.log(found)

    def texts(self, length):
        """{tokens: probability} of the target's next tokens."""
        found = {(): 1.0}
        for _ in range(length):
            found = {(*text, v): p * q for text, p in found.items() for v, q in enumerate(self.target(text))}
        return found


def draws(world, lane, prefix=()):
    """Yield (probability, sibling groups below a prefix) over all that a drafter may draw there."""
    distribution, count = world.distribution(lane, prefix), world.num_children(lane, prefix)
    if not count:
        yield 1.0, ()
        return
    is_chosen = len(prefix) < world.chosen
    likeliest = np.argsort(-distribution.weights.astype(int), kind="stable")[:count]
    possible = np.flatnonzero(distribution.weights).tolist()
    for tokens in [tuple(likeliest.tolist())] if is_chosen else itertools.permutations(possible, count):
        probability, left = 1.0, distribution.weights.astype(float)
        for token in tokens:
            probability *= 1.0 if is_chosen else left[token] / left.sum()
            left[token] = 0
        for below in itertools.product(*(list(draws(world, lane, (*prefix, token))) for token in tokens)):
            chance = probability * float(np.prod([p for p, _ in below]))
            yield chance, ((prefix, tokens), *itertools.chain.from_iterable(groups for _, groups in below))


def num_draws(world, lane, prefix=()):
    """How many outcomes `draws` yields."""
    count = world.num_children(lane, prefix)
    if not count:
        return 1
    below = [num_draws(world, lane, (*prefix, token)) for token in range(world.vocab)]
    if len(prefix) < world.chosen:
        return int(np.prod(np.sort(below)[-count:]))  # at most
    return sum(int(np.prod([below[t] for t in tokens])) for tokens in itertools.permutations(range(world.vocab), count))


def draft_of(world, lane, sibling_groups):
    """The message of a drafter: parents before children, siblings in draw order."""
    ids, tokens, parents, scores, rows, distributions = {(): -1}, [], [], [], [], []
    for prefix, drawn in sibling_groups:
        distribution = world.distribution(lane, prefix)
        distributions += [distribution] if len(prefix) >= world.chosen else []
        scores += world.scores_of(lane, prefix, drawn, distribution).tolist()
        for token in drawn:
            ids[*prefix, token] = len(tokens)
            tokens.append(token)
            parents.append(ids[prefix])
            rows.append(len(distributions) - 1 if len(prefix) >= world.chosen else -1)
    packed = pack_distributions(distributions, rows)
    return _message(lane, tokens, parents, scores, q_size=world.vocab * bool(distributions), **packed)


def points_of(world):
    """The message of a drafter without sampling: a tree of point masses."""
    ids, tokens, parents, scores = {(): -1}, [], [], []
    for prefix in [(), *((token,) for token in world.points(()))]:
        for token in world.points(prefix):
            ids[*prefix, token] = len(tokens)
            tokens.append(token)
            parents.append(ids[prefix])
            scores.append(np.log(0.05 + 0.9 * rng_of(world.entropy, SCORE, POINT_LANE, *prefix, token).random()))
    return _message(POINT_LANE, tokens, parents, scores)


def _message(lane, tokens, parents, scores, **distributions):
    return Draft(
        session_id=1, epoch=1, lane=lane, base_len=len(CONTEXT), first_id=0, token_ids=np.array(tokens, np.int32),
        parent_ids=np.array(parents, np.int32), scores=np.array(scores, np.float16), **distributions,
    )  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """How a verifier is set up, and what else shares its step: `curve`; the most rows of a step; the engine's
    `max_chain`; tokens that the session may still say; what is known of lanes: (lane, score, was accepted); other
    sessions; how the job is drafted for; what makes the session's grammar, whose forced tokens are drafted too."""

    curve: object
    max_rows: int = 64
    max_chain: int = 0
    tokens_left: int = 50
    seen: tuple = ()
    others: tuple = ()
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    grammar: Callable[[], SessionGrammar] | None = None


def open_session(drafts, serving):
    """A decoding session whose tree the drafts have made."""
    grammar = {"grammar": '{"regex":"."}'} if serving.grammar else {}  # it is set below
    params = SamplingParams(temperature=1.0, strategy="probabilistic", **grammar)
    session = Session(Open(
        session_id=1, epoch=1, prompt_len=len(CONTEXT), tokens_left=serving.tokens_left, params=params,
        token_ids=np.array(CONTEXT, np.int32), speculation=serving.speculation,
    ), trees=TREES)  # fmt: skip
    for draft in drafts:
        graft(session, draft, 0.0)
    lanes = session.trees.lanes(session.place)  # once: to make them takes most of opening a session
    for lane, score, accepted in serving.seen:
        if lane in lanes:
            lanes[lane].calibration.observe(score, accepted)
    if serving.grammar:
        session.follow(serving.grammar(), needs_last=True)
    return session


def share_of(session, serving):
    """What the real scheduler gives a session in the next step."""
    session.kv_len = session.length - 1
    if session.grammar is not None:
        for drafts in ForcedTokens().collect([session], None, lambda: 0.0):
            graft_batch(drafts, 0.0)
    limits = {"max_rows": serving.max_rows, "free_slots": 1000, "max_chain": serving.max_chain}
    planned = plan([session, *serving.others], serving.curve, **limits)
    return next(share for share in planned.shares if share.session is session)


def judged(world, tree, prefix):
    """{tokens: probability} of what a round commits: the rule of speculative sampling, with probabilities for draws."""
    children = {}
    for i, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(i)
    found = {}
    _descend(world, tree, children, -1, prefix, 1.0, found)
    return found


def _descend(world, tree, children, node, prefix, chance, found):
    target = world.target(prefix)
    drawn_from = None
    for child in children.get(node, []):  # sampled ones come first, in draw order
        token = int(tree.token_ids[child])
        row = -1 if tree.distributions is None else int(tree.distributions.rows[child])
        if row >= 0:
            if drawn_from is None:
                drawn_from = np.zeros(world.vocab)
                drawn_from[tree.distributions.ids[row]] = tree.distributions.weights[row]
            proposal = drawn_from / drawn_from.sum()
            drawn_from[token] = 0
        else:
            proposal = np.eye(world.vocab)[token]
        accept = min(1.0, target[token] / proposal[token])
        if accept > 0:
            _descend(world, tree, children, child, (*prefix, token), chance * accept, found)
        chance *= 1 - accept
        if chance <= 0:
            return
        target = np.maximum(target - proposal, 0)
        if target.sum() <= 0:
            return
        target = target / target.sum()
    for token in np.flatnonzero(target).tolist():
        text = (*prefix, token)
        found[text] = found.get(text, 0.0) + chance * target[token]


def outcomes(world):
    """Yield (probability, drafts in the order in which they come) over all that the drafters may draw."""
    lanes = [list(draws(world, lane)) for lane in range(world.num_lanes)]
    points = [points_of(world)] if world.num_points else []
    for drawn in itertools.product(*lanes):
        sent = [draft_of(world, lane, sibling_groups) for lane, (_, sibling_groups) in enumerate(drawn)]
        yield float(np.prod([p for p, _ in drawn])), [*points, *sent] if world.points_first else [*sent, *points]


def committed(world, serving, num_rounds=1):
    """{tokens: probability} of the commits of a number of rounds."""
    found, known = {}, {}
    for probability, drafts in outcomes(world):
        _play(world, serving, drafts, (), probability, num_rounds, found, known)
    return found


def _play(world, serving, drafts, said, probability, num_rounds, found, known):
    """Add what further rounds commit after some rounds have said these tokens, a tuple a round."""
    session = open_session(drafts, serving)
    for tokens in said:
        commit(session, tokens, 0)
        if session.grammar is not None:
            session.grammar.commit(tokens)
    prefix = tuple(session.token_ids[len(CONTEXT) :])
    tree = share_of(session, serving).step.tree
    drawn_from = () if tree.distributions is None else (tree.distributions.rows, tree.distributions.weights)
    key = prefix, *(array.tobytes() for array in (tree.token_ids, tree.parents, *drawn_from))
    session.close()
    if key not in known:
        known[key] = judged(world, tree, prefix)
    for text, chance in known[key].items():
        if num_rounds > 1 and chance > 0:
            more = (*said, text[len(prefix) :])
            _play(world, serving, drafts, more, probability * chance, num_rounds - 1, found, known)
        else:
            found[text] = found.get(text, 0.0) + probability * chance


def completed(world, found, length):
    """{tokens: probability} of the first tokens: shorter texts go on with the target's distribution."""
    total, going_on = dict.fromkeys(itertools.product(range(world.vocab), repeat=length), 0.0), dict(found)
    while going_on:
        text, probability = going_on.popitem()
        if len(text) >= length:
            total[text[:length]] += probability
            continue
        for token, chance in enumerate(world.target(text).tolist()):
            going_on[*text, token] = going_on.get((*text, token), 0.0) + probability * chance
    return total


def distance(world, serving, length, num_rounds=1):
    """The total variation between what is committed and the target's distribution, over the first tokens."""
    actual, expected = completed(world, committed(world, serving, num_rounds), length), world.texts(length)
    return sum(abs(actual[text] - expected[text]) for text in expected) / 2
