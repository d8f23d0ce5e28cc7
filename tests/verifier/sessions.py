"""A session of the verifier, drafts for it, and what is drafted in it, for tests."""

import numpy as np

from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.verifier.session import Session


def make_session(
    context: list[int] | None = None, tokens_left: int = 100, speculation: Speculation | None = None
) -> Session:
    """Return a session with a context, [1, 2, 3] by default."""
    token_ids = np.array(context or [1, 2, 3], np.int32)
    return Session(
        Open(
            session_id=7,
            epoch=1,
            prompt_len=len(token_ids),
            tokens_left=tokens_left,
            params=SamplingParams(),
            speculation=speculation or Speculation(),
            token_ids=token_ids,
        )
    )


def make_draft(base_len: int, first_id: int, tokens: list[int], parents: list[int], lane: int = 0) -> Draft:
    """Return a draft with scores of log 0.5."""
    scores = np.full(len(tokens), np.log(0.5), np.float16)
    return Draft(
        session_id=7, epoch=1, lane=lane, base_len=base_len, first_id=first_id,
        token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32), scores=scores,
    )  # fmt: skip


def paths(session: Session) -> set[tuple[int, ...]]:
    """Return the token paths of all live nodes."""
    found: set[tuple[int, ...]] = set()
    stack = [(node, (token,)) for token, node in session.roots.items()]
    while stack:
        node, path = stack.pop()
        found.add(path)
        stack += [(child, (*path, token)) for token, child in node.children.items()]
    return found
