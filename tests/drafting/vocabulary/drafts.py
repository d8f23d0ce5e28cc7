"""A scripted draft model of another vocabulary."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from specq.drafting import CONTEXT, Drafter, Expansion
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.interface import Children
from specq.drafting.suffix.ngram import NgramDrafter
from specq.drafting.vocabulary import in_vocabulary
from specq.protocol import EngineError, SamplingParams
from specq.testing import make_checkpoint
from specq.testing.tokenizer import sentencepiece_files, tokenizer_files
from specq.testing.toy import toy_info
from specq.text import ByteCodec, Vocabularies

TRAINED, PIECES = ByteCodec(tokenizer_files()), ByteCodec(sentencepiece_files())


BOTH = Vocabularies(
    PIECES, TRAINED
)  # the draft model is SentencePiece's: its checkpoint knows the first 99 of its tokens


INFO = replace(toy_info(), num_tokens=len(TRAINED.tokens), tokenizer_hash="trained", eos_ids=(2,))


DRAWN = SamplingParams(temperature=1.0, strategy="probabilistic")


TEXT = TRAINED.encode(b"Janet sells her eggs")


class ScriptedDraft(Drafter):
    """A draft model that knows one text by heart, in its own tokens; it draws nothing."""

    def __init__(self, text: bytes, end: list[int] | None = None) -> None:
        self.info = replace(toy_info(), vocab_size=len(PIECES.tokens), num_tokens=len(PIECES.tokens))
        self.tokens = [*PIECES.encode(text), *(end or [])]
        self.context: list[int] = []
        self.nodes: dict[int, int] = {}
        self.num_passes = 0

    def open(self, session_id, token_ids, params, owner=""):
        self.context, self.nodes = token_ids.tolist(), {CONTEXT: 0}

    def close(self, session_id):
        self.context = []

    def commit(self, session_id, token_ids, path):
        self.context += token_ids.tolist()
        depth = len(token_ids) if len(path) == len(token_ids) else 10**6
        self.nodes = {i: at - depth for i, at in self.nodes.items() if at > depth} | {CONTEXT: 0}

    def expand(self, requests):
        self.num_passes += 1
        answers = []
        for request in requests:
            if request.node_id not in self.nodes:
                raise EngineError("unknown node")
            depth = self.nodes[request.node_id]
            said = len(PIECES.decode(self.context)), self.tokens[self._at() + depth :][:1]
            for child_id in request.child_ids[:1]:
                self.nodes[child_id] = depth + 1
            answers.append(Children(np.array(said[1], np.int32), np.full(len(said[1]), -0.5, np.float32)))
        return answers

    def _at(self):
        """Return how many of its text's tokens stand in the context."""
        length = len(PIECES.decode(self.context))
        ends = list(itertools.accumulate(len(PIECES.tokens[i] or b"") for i in self.tokens))
        return ends.index(length) + 1 if length in ends else 0


def shared(directory, **options):
    draft = DraftModel(str(directory), device="cpu", kv_slots=1024, rng=np.random.default_rng(0), **options)
    return draft, in_vocabulary(draft, "shared", BOTH, INFO)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["shared", "text", "text of ngram"])
def drafter(request, directory):
    way, _, kind = request.param.partition(" of ")
    draft = DraftModel(str(directory), device="cpu", kv_slots=1024) if not kind else NgramDrafter()
    return in_vocabulary(draft, way, BOTH, INFO)


NODE_IDS = itertools.count()


def chain(drafter, depth, session_id=1):
    """Draft a chain; return its tokens and node ids."""
    token_ids, node_ids = [], []
    for node_id in itertools.islice(NODE_IDS, depth):
        (children,) = drafter.expand([Expansion(session_id, node_ids[-1] if node_ids else CONTEXT, (node_id,))])
        if not len(children.token_ids):
            break
        token_ids.append(int(children.token_ids[0]))
        node_ids.append(node_id)
    return token_ids, node_ids


# --- text -------------------------------------------------------------------------------------------------------------


def drafted(text, context=b"Janet", end=None, depth=40):
    """Return what `text` drafts after a context, in the target's tokens."""
    drafter = in_vocabulary(ScriptedDraft(context + text, end), "text", BOTH, INFO)
    drafter.open(1, np.array(TRAINED.encode(context), np.int32), DRAWN)
    return chain(drafter, depth)[0]
