"""What a chunk of a stream says of speculation, for requests with `explain`: its field `specq`."""

from __future__ import annotations

from specq.client import Piece
from specq.gateway.shapes import Json
from specq.text import TextCodec


class Details:
    """The field of each piece; texts of tokens are the codec's."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def of(self, place: int, piece: Piece) -> Json:
        """Return where each token comes from, which drafts were rejected beside them, and what their rounds took.

        `place` of the first token; what was held back to the end is a text without a token.
        """
        tokens = zip(piece.token_ids, piece.texts, piece.origins, strict=True)
        told = [{"id": token, "text": text, "origin": origin} for token, text, origin in tokens]
        held = [{"id": None, "text": text, "origin": origin} for text, origin in piece.spans if not told]
        return {
            "place": place,
            "tokens": told or held,
            "rejected": [
                {
                    "place": draft.place,
                    "id": draft.token_id,
                    "text": self._codec.tokens[draft.token_id].text,
                    "parent": draft.parent,
                    "origin": draft.origin,
                    "accept_prob": round(draft.accept_prob, 4),
                }
                for draft in piece.rejected
            ],
            "rounds": [
                {"place": one.place, "step_ms": one.step_us / 1e3, "wait_ms": one.wait_us / 1e3} for one in piece.rounds
            ],
        }
