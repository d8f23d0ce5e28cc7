"""The broker as a process: `python workers/broker.py [OPTIONS]` is `specq broker [OPTIONS]`.

Its loop is in `specq.processes.broker`.
"""

from __future__ import annotations

import sys

from specq.cli import main

if __name__ == "__main__":
    main(["broker", *sys.argv[1:]])
