"""A broker for client tests: a ROUTER on a free TCP port and one function that answers messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import zmq

from specq.protocol import (
    BROKER_CAPABILITIES,
    DRAFT_WORKER,
    ORIGIN_CODES,
    PLAIN,
    Accepted,
    Cancel,
    FetchTokenizer,
    GetStatus,
    Message,
    ModelInfo,
    Status,
    Submit,
    Tokens,
    decode,
    encode,
)
from specq.testing.tokenizer import tokenizer_files, tokenizer_json
from specq.text import TextCodec, num_tokens, tokenizer_chunks, tokenizer_hash

ANSWER = "A wörld of eggs.\nEND and more"
CODEC = TextCodec(tokenizer_files())
ANSWER_IDS = CODEC.encode(ANSWER)
INFO = ModelInfo(
    name="fake",
    fingerprint="0",
    dtype="float32",
    engine="none",
    vocab_size=num_tokens(tokenizer_json()),
    num_tokens=num_tokens(tokenizer_json()),
    eos_ids=(2,),
    max_length=100,
    tokenizer_hash=tokenizer_hash(tokenizer_json()),
)
STATS = {
    "rounds": 4,
    "cached_tokens": 2,
    "drafted": 9,
    "draft_tokens": 8,
    "accepted_tokens": 6,
    "stale": 1,
    "accepted_lengths": [1, 1, 1, 1],
}

REPORT = {
    "capabilities": list(BROKER_CAPABILITIES),
    "models": ["fake"],
    "workers": [{"role": "target", "state": "ready"}],
}

Answer = Callable[[Message], Sequence[Message]]


def tokens(job_id: int, base_len: int, ids: Sequence[int], finish: str = "") -> Tokens:
    """Return a message of tokens, all but the last from a draft worker. Statistics come with the end."""
    return Tokens(
        job_id=job_id,
        base_len=base_len,
        finish=finish,
        stats=STATS if finish else {},
        token_ids=np.array(ids, np.int32),
        origins=np.array(
            [ORIGIN_CODES[DRAFT_WORKER]] * (len(ids) - 1) + [ORIGIN_CODES[PLAIN]] * min(1, len(ids)), np.uint8
        ),
    )


def answer(message: Message) -> Sequence[Message]:
    """Answer like a broker with one verifier that always emits ANSWER, three tokens per round."""
    match message:
        case FetchTokenizer():
            return list(tokenizer_chunks(INFO, tokenizer_files()))
        case GetStatus():
            return [Status(report=REPORT)]
        case Submit():
            return [Accepted(job_id=message.job_id), *completion(message)]
        case Cancel():
            return [tokens(message.job_id, 0, [], "cancelled")]
    return []


def completion(job: Submit) -> list[Message]:
    """Return all tokens of a job, in rounds of three."""
    ids = ANSWER_IDS[: job.params.max_tokens]
    finish = "length" if len(ids) == job.params.max_tokens else "stop"
    starts = range(0, len(ids), 3)
    return [tokens(job.job_id, s, ids[s : s + 3], finish if s + 3 >= len(ids) else "") for s in starts]


class FakeBroker:
    """Runs `answer` behind a ROUTER until the block ends, and keeps the received messages."""

    def __init__(self, reply: Answer = answer, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.reply, self.heard = reply, list[Message]()
        self._changed = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(5)
        self._socket.close()
        self._context.term()

    def wait_for(self, kind: type[Message], count: int = 1, timeout_s: float = 10.0) -> list[Message]:
        """Wait until `count` messages of a type have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_heard(kind) >= count, timeout_s), f"no {kind.__name__}"
            return [message for message in self.heard if isinstance(message, kind)]

    def num_heard(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def _run(self) -> None:
        while not self._stop:
            if not self._socket.poll(20):
                continue
            identity, *frames = self._socket.recv_multipart()
            message = decode(frames)
            with self._changed:
                self.heard.append(message)
                self._changed.notify_all()
            for reply in self.reply(message):
                self._socket.send_multipart([identity, *encode(reply)])
