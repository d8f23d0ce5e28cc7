"""`specq broker` that checks after each message what must hold of its memory, and stops where that does not: with its
options."""

from __future__ import annotations

import sys

from specq.broker import Broker
from specq.cli import main

if __name__ == "__main__":
    Broker.validates = True
    main(["broker", *sys.argv[1:]])
