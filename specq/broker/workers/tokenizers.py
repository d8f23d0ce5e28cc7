"""Tokenizers for clients: fetched once from a verifier that has them, kept by hash, handed out in pieces.

Rules: a verifier sends its own tokenizer only. A tokenizer that no present verifier has is forgotten at the next tick,
and so are the pieces of one that is gone; clients that wait for these are served by another that has the same, or ask
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.broker.state.memory import BrokerState, Send
from specq.protocol import Failed, FetchTokenizer, Frames, ProtocolError, TokenizerChunk, did_you_mean, encode, shown

MAX_WAITING = 4096  # clients for one tokenizer


class Tokenizers:
    """Handlers of what clients and verifiers say of tokenizers."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._known: dict[str, list[Frames]] = {}  # by tokenizer hash: its pieces, in order
        self._pieces: dict[tuple[bytes, str], dict[int, Frames]] = {}  # of those on their way
        self._waiting: dict[str, set[bytes]] = {}  # by tokenizer hash: the clients that wait for it
        self._asked: dict[str, bytes] = {}  # by tokenizer hash: the verifier that was asked last

    def fetch(self, client: bytes, message: FetchTokenizer) -> None:
        """Answer with the pieces of the tokenizer, fetched once from a verifier."""
        verifiers = self.state.workers.verifiers(message.model)
        if not verifiers and self.state.clock.in_grace:
            return
        if not verifiers:
            reason = no_verifier(message.model, self.state.workers.served_models())
            self.state.outbox.send_front(client, Failed(job_id=0, code="no_verifier", reason=reason))
            return
        wanted = verifiers[0].model.tokenizer_hash
        if wanted in self._known:
            self._serve(client, wanted)
            return
        waiting = self._waiting.setdefault(wanted, set())
        if len(waiting) >= MAX_WAITING:  # who is left out asks again
            return
        waiting.add(client)
        self._ask(verifiers[0].identity, wanted)

    def _ask(self, verifier: bytes, tokenizer_hash: str) -> None:
        worker = self.state.workers.get(verifier)
        if worker is not None:
            self._asked[tokenizer_hash] = verifier
            self.state.outbox.send_back(verifier, FetchTokenizer(model=worker.model.name))

    def chunk(self, verifier: bytes, message: TokenizerChunk) -> None:
        """Collect a piece; the last one serves all who wait. Raises ProtocolError for what is not the verifier's to
        say; what nobody asked for is dropped, or it would be kept without end."""
        worker = self.state.workers.get(verifier)
        wanted = message.model.tokenizer_hash
        if worker is None or wanted != worker.model.tokenizer_hash:
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
        """Forget what no verifier has that is there; ask another for what clients wait for from one that is gone."""
        there = {worker.identity: worker.model.tokenizer_hash for worker in self.state.workers.verifiers()}
        hashes = set(there.values())
        for table in (self._known, self._waiting, self._asked):
            for lost in table.keys() - hashes:
                del table[lost]
        for key in [key for key in self._pieces if key[0] not in there]:
            del self._pieces[key]
        for wanted in self._waiting:
            if self._asked.get(wanted) not in there:
                self._ask(next(identity for identity, found in there.items() if found == wanted), wanted)

    def _serve(self, client: bytes, tokenizer_hash: str) -> None:
        self.state.outbox.add(*(Send("front", client, frames) for frames in self._known[tokenizer_hash]))


def no_verifier(model: str, served: Sequence[str]) -> str:
    """Return the message for a client whose model nobody serves; `served`: the models that there are."""
    wanted = f" of model {shown(model)}" if model else ""
    others = f"; served: {', '.join(served)}" if served else ""
    hint = did_you_mean(model, served)
    how = f"{hint} Or start one" if hint else "start one"
    return f"no verifier{wanted} is registered with this broker{others}; {how}: specq worker --role target"
