"""What tests of engines with a step in flight share: sessions that come, end and are served; judging that a CPU does as
a GPU would."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specq.engines import Engine
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol.messages import Ack, Close, Open
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import VOCAB, random_tokens
from specq.verification import StepBatch
from specq.verification.begun import Judging, begin
from specq.verification.judge import judge_each
from specq.verifier import DraftSource
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from tests.grammar.serving import Builder
from tests.verification.begun_rows import begun_rows

NUM = 9
GREEDY = SamplingParams()


def judge_later(batch: StepBatch, logits: torch.Tensor) -> Judging:
    """Judge as on a GPU: what can be said without the host is chosen at once."""
    with begun_rows():
        return begin(batch, logits)


def let_judge(overlaps: bool, worker: Any) -> None:
    """Let a worker of vLLM's judge so that steps can overlap, or not."""
    steps = worker.worker.specq_steps
    if not steps.overlaps:  # on a CPU
        steps._judge_by = judge_later if overlaps else judge_each


def counted(engine: Any) -> list[int]:
    """Return a list that gets, with each step that the engine launches from now on, how many are in flight then."""
    workers, found = engine._sessions._workers, list[int]()
    launch = type(workers).launch

    def launched(plan: Any) -> None:
        launch(workers, plan)
        found.append(len(workers._flights))

    workers.launch = launched
    return found


def tokenizer_files() -> dict[str, str]:
    """Return the files of a tokenizer with as many tokens as the test model has: an end, and single characters."""
    letters = ["\u0120", *map(chr, range(ord("!"), ord("~") + 1))]  # the first is a space
    made = Tokenizer(BPE({token: i for i, token in enumerate(["<end>", *letters])}, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    made.add_special_tokens(["<end>"])
    return {"tokenizer.json": made.to_str()}


def grammar_builder() -> Builder:
    """Return what builds grammars for the test model."""
    return Builder(build_tokenizer(tokenizer_files(), VOCAB, (0,)))


def opening(session_id: int, epoch: int = 1, penalty: float = 0.7, grammar: str = "", mode: str = "plain") -> Open:
    """Return a session: some are greedy, some warm, some cut; some share a prompt; the logits of some are shaped, by
    `penalty` also by what they have said; each ends elsewhere. Two of three have the grammar."""
    prompt = random_tokens(np.random.default_rng(session_id // 2), 20 + 13 * (session_id // 2))
    params = SamplingParams(
        temperature=0.9 * (session_id % 3 > 0), top_p=0.9 if session_id % 3 > 1 else 1.0, seed=session_id,
        stop_token_ids=tuple(range(0, VOCAB, 40)) if session_id % 2 else (), ignore_eos=True,
        frequency_penalty=penalty * (session_id % 4 == 3), logprobs=2 if session_id % 5 == 4 else -1, logit_bias=((5,
        2.0),) * (session_id % 3 == 2), grammar=grammar if session_id % 3 else "",
    )  # fmt: skip
    return Open(
        session_id=session_id, epoch=epoch, prompt_len=len(prompt), tokens_left=30 + session_id, params=params,
        token_ids=prompt, speculation=Speculation(mode=mode),
    )  # fmt: skip


def serve(
    engine: Engine,
    seed: int = 0,
    penalty: float = 0.7,
    grammar: str = "",
    source: DraftSource | None = None,
    before_step: Callable[[Verifier], object] = bool,
) -> dict[int, list[int]]:
    """Serve sessions (`opening`) that come one after the other, some of which are closed or opened again on the way;
    return their texts. With a penalty some join every second step only, so that hardly a step is that of the sessions
    before until these have ended. With a source they take drafts."""
    mode = "plain" if source is None else "async"
    random, texts = Random(seed), dict[int, list[int]]()
    verifier = Verifier(
        engine, StepCurve([1, 64], [0.005, 0.01]), [source] if source is not None else (), incarnation=1,
        max_step_rows=40, max_uncommitted=9, measures_drafts=source is None,
        grammar_builder=grammar_builder() if grammar else None, tokenizer_files=tokenizer_files() if grammar else None,
    )  # fmt: skip
    verifier.control._awaits_histories = lambda *_: False  # type: ignore[method-assign]
    turn = 0
    while turn < 2 * NUM or verifier.has_work:
        if turn < 2 * NUM and turn % 2 == 0:
            verifier.handle(opening(turn // 2, penalty=penalty, grammar=grammar, mode=mode), 0.0)
        if turn in (9, 15):
            verifier.handle(Close(session_id=turn - 8, epoch=1), 0.0)
        if turn in (11, 17):
            verifier.handle(opening(turn - 9, epoch=2, penalty=penalty, grammar=grammar, mode=mode), 0.0)
        for session in list(verifier.sessions.values()) if random.random() < 0.8 else ():
            verifier.handle(Ack(session_id=session.session_id, epoch=session.epoch, length=session.length), 0.0)
        turn += 1
        assert not verifier.take_grammars()
        if verifier.has_work:
            before_step(verifier)
            verifier.step(lambda: 0.0)
        else:
            random.random()
        if turn > 2 * NUM and not verifier.has_work:
            for session in verifier.sessions.values():
                verifier.handle(Ack(session_id=session.session_id, epoch=session.epoch, length=session.length), 0.0)
    for session in list(verifier.sessions.values()):
        assert session.finish
        texts[session.session_id] = session.token_ids
        verifier.handle(Close(session_id=session.session_id, epoch=session.epoch), 0.0)
    assert engine.free_slots == engine.info.kv_slots
    return texts


def plain(session_ids: list[int], starts: list[int], tokens: list[int], fed_by: list[int] | None = None) -> StepBatch:
    steps = [
        SessionStep(i, start, np.array([token], np.int32), GREEDY)
        for i, start, token in zip(session_ids, starts, tokens, strict=True)
    ]
    batch = StepBatch.of(steps)
    batch.fed_by = None if fed_by is None else np.array(fed_by, np.int32)
    return batch
