"""A program: serve sessions with vLLM in two processes, with a step in flight and without, and with drafts that the
host reads when a step is launched and without drafts, and print the texts of all as JSON, the log-probabilities of a
prompt, and what is said when the second process fails; for `tests/end_to_end/test_vllm.py`. On a CPU the processes
judge as they would on a GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specq.engines import Engine
from specq.engines.torch.engine import TorchEngine
from specq.engines.vllm.engine import VllmEngine
from specq.protocol.errors import EngineLostError
from specq.protocol.types import ScoredRows, SessionStep
from specq.testing.checkpoints import make_checkpoint, random_tokens
from tests.devices import vllm_arguments
from tests.engines import test_unread_chains as drafts
from tests.engines.overlapping import GREEDY, counted, let_judge, serve


def fail(*_: Any) -> None:
    """Return no judgement."""
    raise RuntimeError("no judge")


def let_fail(worker: Any) -> None:
    """Let the second worker's judge fail. Its judgements are not used."""
    if worker.worker.rank == 1:
        worker.worker.specq_steps._judge_by = fail


def serve_unread(engine: VllmEngine, directory: Path, kind: str) -> dict[str, Any]:
    """Return what is said without drafts and with unread ones; see `main`."""
    way: Any = engine._sessions
    own = drafts.serve(engine, None, 0)
    way._core.collective_rpc(partial(let_judge, True))
    engine.overlaps = engine.takes_unread = way.overlaps = True
    accepted, numbers, collect, sender = list[int](), set[int](), way._collect, way._workers.late

    def noted(flight: Any) -> Any:
        output = collect(flight)
        if flight.batch.drafted is not None:
            accepted.append(int((output.judgements.num_tokens - 1).sum()))
        return output

    def sent(number: int, token_ids: Any, send: Any = sender.send) -> None:
        numbers.add(number)
        send(number, token_ids)

    way._collect, sender.send = noted, sent
    drafter = drafts.make_drafter(directory, "cuda" if kind == "cuda" else "cpu as a gpu", 0, 1)
    return {
        "own": own,
        "unread": drafts.serve(engine, drafter, 0),
        "accepted": sum(accepted),
        "late": len(numbers),
    }


def prompt_logprobs(engine: Engine) -> list[float]:
    """Return those of a prompt's tokens but the first."""
    prompt = random_tokens(np.random.default_rng(9), 12)
    engine.open(0, prompt, "alone")
    output = engine.step([SessionStep(0, 0, prompt, GREEDY, scored=ScoredRows(prompt[1:], 2))])
    engine.close(0)
    return [float(value) for value in output.scored[0].tokens]


def main(directory: str, kind: str) -> None:
    """Print {"together": texts, "apart": texts}, {"own": texts, "unread": texts} of sessions by id, "scored": {name:
    log-probabilities}, "most": steps in flight at once, "accepted": drafted tokens, "late": how many steps waited for
    some, and "lost": an error."""
    arguments = vllm_arguments(kind) | {"dtype": "float32"}
    arguments["options"] = arguments.get("options", {}) | {"tensor_parallel_size": 2}
    path = str(make_checkpoint("llama-bf16", Path(directory)))
    engine = VllmEngine(path, kv_slots=1536, **arguments)
    try:
        way: Any = engine._sessions
        texts: dict[str, Any] = {"scored": {"torch": prompt_logprobs(TorchEngine(path, device="cpu", dtype="float32"))}}
        in_flight = counted(engine)
        for name, overlaps in (("together", True), ("apart", False)):
            way._core.collective_rpc(partial(let_judge, overlaps))
            engine.overlaps = way.overlaps = overlaps
            texts[name], texts["scored"][name] = serve(engine), prompt_logprobs(engine)
        texts["most"] = max(in_flight)
        texts |= serve_unread(engine, Path(directory), kind)
        way._core.collective_rpc(let_fail)
        engine.open(0, np.array([5, 6], np.int32))
        try:
            engine.step([SessionStep(0, 0, np.array([5, 6], np.int32), GREEDY)])
        except EngineLostError as error:
            texts["lost"] = str(error)
        sys.stdout.write(json.dumps(texts) + "\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
