"""A draft worker as a process: `python workers/draft.py [OPTIONS]` is `specq worker --role draft [OPTIONS]`.

Its loop is in `specq.processes.draft`.
"""

from __future__ import annotations

import sys

from specq.cli import main

if __name__ == "__main__":
    main(["worker", "--role", "draft", *sys.argv[1:]])
