"""Complete one prompt, and print its text and what speculation did.

python examples/generate.py "def add(a, b):"
"""

import os
import sys

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")


def main(prompt: str) -> None:
    with specq.Client(BROKER) as client:
        result = client.generate(prompt, max_tokens=48)
    print(prompt + result.text)
    print(
        f"{result.stats['rounds']} rounds for {len(result.token_ids)} tokens; "
        f"{result.stats['mean_accepted_length']:.2f} tokens a round"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "def add(a, b):")
