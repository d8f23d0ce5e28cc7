"""A target verifier as a process: `python workers/target.py [OPTIONS]` is `specq worker --role target [OPTIONS]`.

Its loop is in `specq.processes.target`.
"""

from __future__ import annotations

import sys

from specq.cli import main

if __name__ == "__main__":
    main(["worker", "--role", "target", *sys.argv[1:]])
