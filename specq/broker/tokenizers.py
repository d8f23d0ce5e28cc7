"""Tokenizers for clients: fetched once from a verifier that has them, kept by hash, handed out in pieces."""

from __future__ import annotations

from specq.broker.state import Send, State
from specq.messages import Failed, FetchTokenizer, TokenizerChunk
from specq.wire import Frames, encode

MAX_WAITING = 4096  # clients for one tokenizer


class Tokenizers:
    """Handlers of what clients and verifiers say of tokenizers."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._known: dict[str, list[Frames]] = {}  # by tokenizer hash: its pieces, in order
        self._pieces: dict[tuple[bytes, str], dict[int, Frames]] = {}  # of those on their way
        self._waiting: dict[str, set[bytes]] = {}  # by tokenizer hash: the clients that wait for it

    def fetch(self, client: bytes, message: FetchTokenizer, now: float) -> None:
        """Answer with the pieces of the tokenizer, fetched once from a verifier."""
        verifiers = self.state.roster.verifiers(message.model)
        if not verifiers and self.state.in_grace:
            return
        if not verifiers:
            self.state.send_front(client, Failed(job_id=0, code="no_verifier", reason=no_verifier(message.model)))
            return
        wanted = verifiers[0].model.tokenizer_hash
        if wanted in self._known:
            self._serve(client, wanted)
            return
        waiting = self._waiting.setdefault(wanted, set())
        if len(waiting) >= MAX_WAITING:  # who is left out asks again
            return
        waiting.add(client)
        self.state.send_back(verifiers[0].identity, message)

    def chunk(self, verifier: bytes, message: TokenizerChunk, now: float) -> None:
        """Collect a piece; the last one serves all who wait. What nobody asked this verifier for is dropped: it would be handed
        out as another's, or be kept for ever."""
        wanted, sender = message.model.tokenizer_hash, self.state.roster.get(verifier)
        if sender is None or sender.model.tokenizer_hash != wanted or wanted not in self._waiting:
            return
        pieces = self._pieces.setdefault((verifier, wanted), {})
        pieces[message.index] = encode(message)
        if len(pieces) < message.count:
            return
        self._pieces = {key: kept for key, kept in self._pieces.items() if key[1] != wanted}
        self._known[wanted] = [pieces[index] for index in sorted(pieces)]
        for client in self._waiting.pop(wanted, set()):
            self._serve(client, wanted)

    def _serve(self, client: bytes, tokenizer_hash: str) -> None:
        self.state.emit(*(Send("front", client, frames) for frames in self._known[tokenizer_hash]))


def no_verifier(model: str) -> str:
    """Return the message for a client whose model nobody serves."""
    wanted = f" of model {model!r}" if model else ""
    return f"no verifier{wanted} is registered with this broker; start one: specq worker --role target"
