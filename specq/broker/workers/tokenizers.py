"""Tokenizers for clients: fetched once from a verifier, kept by model and hash, sent in pieces.

The hash alone does not name what is sent. Models of one vocabulary may differ in the chat template and in their length.

Rules: a verifier sends only its own tokenizer. At each tick, the broker forgets tokenizers that no present verifier
has. It also forgets the pieces of lost verifiers. Waiting clients then get the tokenizer from another verifier that has
it, or ask again.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.broker.state.memory import BrokerState, Send
from specq.protocol import (
    Failed,
    FetchTokenizer,
    Frames,
    ModelInfo,
    ProtocolError,
    TokenizerChunk,
    did_you_mean,
    encode,
    shown,
)

MAX_WAITING = 4096  # clients for one tokenizer

Key = tuple[str, str]  # a model's name, and the hash of its tokenizer


def _key(model: ModelInfo) -> Key:
    return model.name, model.tokenizer_hash


class Tokenizers:
    """Handles the messages of clients and verifiers about tokenizers."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._known: dict[Key, list[Frames]] = {}  # the pieces of each, in order
        self._pieces: dict[tuple[bytes, Key], dict[int, Frames]] = {}  # of incomplete ones, by verifier
        self._waiting: dict[Key, set[bytes]] = {}  # the clients that wait for each
        self._asked: dict[Key, bytes] = {}  # the verifier that was asked last for each

    def fetch(self, client: bytes, message: FetchTokenizer) -> None:
        """Answer with the pieces of the tokenizer, fetched once from a verifier."""
        verifiers = self.state.workers.verifiers(message.model)
        if not verifiers and self.state.clock.in_grace:
            return
        if not verifiers:
            reason = no_verifier(message.model, self.state.workers.served_models())
            self.state.outbox.send_front(client, Failed(job_id=0, code="no_verifier", reason=reason))
            return
        wanted = _key(verifiers[0].model)
        if wanted in self._known:
            self._serve(client, wanted)
            return
        waiting = self._waiting.setdefault(wanted, set())
        if len(waiting) >= MAX_WAITING:  # a client beyond the limit asks again
            return
        waiting.add(client)
        self._ask(verifiers[0].identity, wanted)

    def _ask(self, verifier: bytes, wanted: Key) -> None:
        worker = self.state.workers.get(verifier)
        if worker is not None:
            self._asked[wanted] = verifier
            self.state.outbox.send_back(verifier, FetchTokenizer(model=worker.model.name))

    def chunk(self, verifier: bytes, message: TokenizerChunk) -> None:
        """Collect a piece. The last one serves all waiting clients.

        Raises ProtocolError if the piece is not of the verifier's own tokenizer. A piece that was not requested is
        dropped, so that memory stays bounded.
        """
        worker = self.state.workers.get(verifier)
        wanted = _key(message.model)
        if worker is None or wanted != _key(worker.model):
            raise ProtocolError("a piece of a tokenizer that is not the sender's")
        if not message.index < message.count:
            raise ProtocolError(f"piece {message.index} of {message.count}")
        if wanted not in self._waiting:
            return
        pieces = self._pieces.setdefault((verifier, wanted), {})
        pieces[message.index] = encode(message)
        if len(pieces) < message.count:
            return
        self._pieces = {key: kept for key, kept in self._pieces.items() if key[1] != wanted}
        self._known[wanted] = [pieces[index] for index in sorted(pieces)]
        for client in self._waiting.pop(wanted, set()):
            if self.state.roles.is_client(client):
                self._serve(client, wanted)

    def tidy(self) -> None:
        """Forget tokenizers that no present verifier has. Ask another verifier if a lost one was asked."""
        there = {worker.identity: _key(worker.model) for worker in self.state.workers.verifiers()}
        keys = set(there.values())
        for table in (self._known, self._waiting, self._asked):
            for lost in table.keys() - keys:
                del table[lost]
        for key in [key for key in self._pieces if key[0] not in there]:
            del self._pieces[key]
        for wanted in self._waiting:
            if self._asked.get(wanted) not in there:
                self._ask(next(identity for identity, found in there.items() if found == wanted), wanted)

    def _serve(self, client: bytes, wanted: Key) -> None:
        self.state.outbox.add(*(Send("front", client, frames) for frames in self._known[wanted]))


def no_verifier(model: str, served: Sequence[str]) -> str:
    """Return the message for a client whose model has no verifier. `served`: the models that there are."""
    wanted = f" of model {shown(model)}" if model else ""
    others = f"; served: {', '.join(served)}" if served else ""
    hint = did_you_mean(model, served)
    how = f"{hint} Or start one" if hint else "start one"
    return f"no verifier{wanted} is registered with this broker{others}; {how}: specq worker --role target"
