"""A model on a CPU whose steps are collected late, as on a GPU: each is planned before the last one is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from specq.client.request import ServedModel, read_request
from specq.drafting.grammar.source import ForcedTokens
from specq.drafting.suffix.source import SuffixDecoder
from specq.engines.torch.engine import TorchEngine
from specq.grammar import GrammarBuilder
from specq.models import resolve_model
from specq.protocol import JobError, Open, SessionFailed, StepOutput, Submit, Tap
from specq.testing.late import LateEngine
from specq.text import TextCodec, load_tokenizer_files
from specq.verification import StepBatch
from specq.verifier import StepCurve, Verifier
from tests.grammar.runs.ways import Arguments, WayOutcome

KV_SLOTS = 30_000


class LateModel(LateEngine):
    """The contract of a late engine, with a model's own judgements."""

    takes_scratch = False
    judges_late = takes_masks = True
    num_tap_layers = 0

    def __init__(self, inner: TorchEngine) -> None:
        super().__init__(inner.info)
        self._inner = inner

    def open(self, session_id: int, token_ids: Any, owner: str = "") -> int:
        super().open(session_id, token_ids, owner)
        num_known = self._inner.open(session_id, token_ids, owner)
        self.contexts[session_id] = [0] * num_known  # only its length counts
        return num_known

    def close(self, session_id: int) -> None:
        super().close(session_id)
        self._inner.close(session_id)

    def compute(self, batch: StepBatch, tap: Tap) -> StepOutput:
        output = self._inner.step(batch, tap)
        accepted = {one.session_id: len(one.token_ids) - 1 for one in output.judgements}
        for step in batch:
            self.contexts[step.session_id] += [0] * (len(step.token_ids) + accepted.get(step.session_id, 0))
        return output


class LateServer:
    """A verifier around a late model. `serve` runs jobs as `specq.bench` does over sockets."""

    def __init__(self, model: str, *, has_drafts: bool) -> None:
        at = resolve_model(model, "target")
        self._engine = LateModel(TorchEngine(at, device="cpu", kv_slots=KV_SLOTS))
        info, files = self._engine.info, load_tokenizer_files(at)
        self.builder = GrammarBuilder(files, info.vocab_size, info.eos_ids)
        self._served = ServedModel(info, TextCodec(files))
        sources = [SuffixDecoder(), ForcedTokens()] if has_drafts else []
        self._verifier = Verifier(
            *(self._engine, StepCurve([1, 64], [0.005, 0.01]), sources),
            incarnation=1,
            measures_drafts=False,
            tokenizer_files=files,
            grammar_builder=self.builder,
        )
        self._ids = count(1)

    @property
    def most_in_flight(self) -> int:
        """The most steps that were in flight at once."""
        return self._engine.most

    def serve(self, jobs: Sequence[Arguments], in_flight: int) -> list[WayOutcome]:
        """Run jobs, so many at a time."""
        return [one for at in range(0, len(jobs), in_flight) for one in self._together(jobs[at : at + in_flight])]

    def _together(self, jobs: Sequence[Arguments]) -> list[WayOutcome]:
        found: dict[int, WayOutcome] = {}
        texts: dict[int, list[int]] = {}
        of_job: list[int] = []
        for arguments in jobs:
            of_job.append(next(self._ids))
            try:
                (submit,) = read_request(dict(arguments), self._served).submits
            except JobError as error:
                found[of_job[-1]] = WayOutcome("error", [], "", str(error))
                continue
            texts[of_job[-1]] = []
            for message in self._verifier.handle(_open_of(submit, of_job[-1]), time.monotonic()):
                self._take(message, texts, found)
        while len(found) < len(jobs):
            for message in self._verifier.take_grammars():
                self._take(message, texts, found)
            if self._verifier.has_work:
                for message in self._verifier.step(time.monotonic):
                    self._take(message, texts, found)
            else:
                time.sleep(0.001)  # grammars are being built
        return [found[i] for i in of_job]

    def _take(self, message: Any, texts: dict[int, list[int]], found: dict[int, WayOutcome]) -> None:
        session_id = message.session_id
        if isinstance(message, SessionFailed):
            found[session_id] = WayOutcome("error", texts[session_id], "", message.reason)
            return
        texts[session_id] += message.token_ids.tolist()
        if message.finish:
            tokens = texts[session_id]
            found[session_id] = WayOutcome(message.finish, tokens, self._served.codec.decode(tokens))

    def close(self) -> None:
        self.builder.close()


def _open_of(submit: Submit, session_id: int) -> Open:
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(submit.prompt_ids),
        tokens_left=submit.params.max_tokens,
        params=submit.params,
        speculation=submit.speculation,
        token_ids=submit.prompt_ids,
    )
