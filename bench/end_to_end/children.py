"""Contestants in processes of their own, so that each leaves the GPU empty. Run as `python -m bench.end_to_end.children
NAME WORKLOAD OPTIONS RESULT`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.end_to_end.workload import Workload
from bench.processes import PYTHON
from specq.protocol import EngineError

PATIENCE_S = 500.0  # with one contestant


def measure_in_child(name: str, work: Workload, **options: Any) -> dict[str, Any]:
    """Return {variant: {load: figures}}; `options` are a contestant's own. Raises EngineError, with what the process printed, if it fails."""
    with TemporaryDirectory(prefix=f"specq-{name}-") as folder:
        workload, result, log = (Path(folder) / file for file in ("workload.json", "result.json", "log"))
        work.save(workload)
        status = _run([*PYTHON, __name__, name, str(workload), json.dumps(options), str(result)], log)
        if status:
            raise EngineError(f"{name} ended with {status}: {log.read_text(errors='replace')[-1500:]}")
        found: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return found


def _run(command: list[str], log: Path) -> str:
    """Run a command; return "" or how it failed."""
    with log.open("wb") as output:
        try:
            done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"no result within {PATIENCE_S:g} s"
    return f"status {done.returncode}" if done.returncode else ""


def main() -> None:
    """Measure one contestant."""
    from bench.end_to_end.rivals import RIVALS

    name, workload, options, result = sys.argv[1:5]
    found = RIVALS[name](Workload.load(Path(workload)), **json.loads(options))
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
