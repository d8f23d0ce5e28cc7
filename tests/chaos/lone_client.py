"""A client's process with one long toy job, to be killed: it says when its first tokens are there.

python -m tests.chaos.lone_client BROKER
"""

from __future__ import annotations

import sys

from specq import Client


def main(broker: str) -> None:
    """Stream a job."""
    with Client(broker, timeout_s=60.0) as client:
        for number, _ in enumerate(client.stream(token_ids=[5, 6, 7], max_tokens=300)):
            if number == 0:
                sys.stdout.write("begun\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
