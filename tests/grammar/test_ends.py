"""A text that its grammar ends within a draft: what lies behind the end is in no verdict."""

from __future__ import annotations

import time

import numpy as np

from specq.drafting.grammar.source import ForcedTokens
from specq.engines.torch.engine import TorchEngine
from specq.grammar import GrammarBuilder
from specq.models import resolve_model
from specq.protocol import Open, SamplingParams, Verdict
from specq.protocol.grammars import grammar_text
from specq.testing.waiting import wait_until
from specq.text import load_tokenizer_files
from specq.verifier import StepCurve, Verifier

GRAMMAR = grammar_text({"choice": ["yes, of course, gladly"]})  # forced from the first token to the last


def test_a_verdict_has_as_many_logprobs_as_tokens() -> None:
    """The broker drops a verdict with others, and then the job never ends."""
    at = resolve_model("tiny", "target")
    engine, files = TorchEngine(at, device="cpu", kv_slots=256), load_tokenizer_files(at)
    builder = GrammarBuilder(files, engine.info.vocab_size, engine.info.eos_ids)
    verifier = Verifier(
        *(engine, StepCurve([1, 64], [0.005, 0.01]), [ForcedTokens()]),
        incarnation=1,
        measures_drafts=False,
        tokenizer_files=files,
        grammar_builder=builder,
    )
    try:
        params = SamplingParams(max_tokens=50, logprobs=2, grammar=GRAMMAR)
        prompt = np.arange(100, 110, dtype=np.int32)
        opened = Open(session_id=1, epoch=1, prompt_len=10, tokens_left=50, params=params, token_ids=prompt)
        assert verifier.handle(opened, 0.0) == []
        wait_until(lambda: verifier.take_grammars() == [] and not verifier.grammars.num_waiting, 60.0)
        found: list[Verdict] = []
        while verifier.has_work:
            found += [one for one in verifier.step(time.monotonic) if isinstance(one, Verdict)]
    finally:
        builder.close()
    assert found[-1].finish == "stop"
    assert sum(len(one.node_ids) for one in found), "nothing was drafted"
    for one in found:
        assert len(one.logprobs) == len(one.token_ids)
        assert len(one.top_ids) == 2 * len(one.token_ids)
