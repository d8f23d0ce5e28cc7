"""Run a module of the repository as a process from any folder: `python bench/__main__.py MODULE [ARGUMENT]...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
