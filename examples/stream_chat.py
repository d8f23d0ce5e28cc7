"""Ask a question by the model's chat template, and print the answer as it comes.

python examples/stream_chat.py "What is 3 times 4?"
"""

import os
import sys

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")


def main(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    with specq.Client(BROKER) as client:
        for piece in client.stream(messages=messages, max_tokens=48):
            print(piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "What is 3 times 4?")
