"""The HTTP gateway as a process: `python workers/gateway.py [OPTIONS]` is `specq serve [OPTIONS]`.

Its loop is in `specq.processes.gateway`.
"""

from __future__ import annotations

import sys

from specq.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
