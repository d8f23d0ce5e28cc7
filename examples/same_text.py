"""Show that drafts change speed and never text: one seed, three ways to draft, one text.

python examples/same_text.py
"""

import os

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")


def main() -> None:
    texts = set()
    with specq.Client(BROKER) as client:
        for mode in ("plain", "sync", "async"):
            result = client.generate("def fibonacci(n):\n", max_tokens=96, temperature=0.8, seed=11, mode=mode)
            texts.add(result.text)
            print(f"{mode:>5}: {result.stats['rounds']} rounds, {result.stats['accepted_tokens']} accepted drafts")
    if len(texts) > 1:
        raise SystemExit("the texts differ")
    print(f"one text: {texts.pop()!r}")


if __name__ == "__main__":
    main()
