"""What the tests of both clients have in common: a chat, and how they run what they await."""

import asyncio

CHAT = [{"role": "user", "content": "Hi"}]


def run_async(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))
