"""A program: serve sessions with vLLM in two processes, with a step in flight and without, and print the texts of both as JSON; for
`tests/end_to_end/test_vllm.py`. On a CPU the processes judge as they would on a GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from specq.engines.vllm.engine import VllmEngine
from specq.testing.checkpoints import make_checkpoint
from tests.devices import vllm_arguments
from tests.engines.overlapping import let_judge, serve


def main(directory: str, kind: str) -> None:
    """Print {"together": texts, "apart": texts} of sessions by id."""
    arguments = vllm_arguments(kind) | {"dtype": "float32"}
    arguments["options"] = arguments.get("options", {}) | {"tensor_parallel_size": 2}
    engine = VllmEngine(str(make_checkpoint("llama-bf16", Path(directory))), kv_slots=1536, way="sessions", **arguments)
    try:
        way: Any = engine._way
        texts = {}
        for name, overlaps in (("together", True), ("apart", False)):
            way._core.collective_rpc(partial(let_judge, overlaps))
            engine.overlaps = way.overlaps = overlaps
            texts[name] = serve(engine)
        sys.stdout.write(json.dumps(texts) + "\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
