"""specq: speculative decoding as a message queue.

    with specq.Client("tcp://127.0.0.1:5750") as client:
        print(client.generate("def add(a, b):", max_tokens=64).text)

Names are imported when they are first used, so that `import specq` and the command line start in a blink.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specq.client import AsyncClient, Client
    from specq.protocol import SamplingParams

__version__ = "0.2.0"

__all__ = ["AsyncClient", "Client", "SamplingParams", "__version__"]

_LAZY = {"Client": "specq.client", "AsyncClient": "specq.client", "SamplingParams": "specq.protocol.types"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'specq' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
