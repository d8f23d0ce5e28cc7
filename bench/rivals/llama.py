"""llama.cpp through llama-cpp-python (the extra `rivals`), on the same GGUF file.

Its bindings complete one text at a time. They draft by prompt lookup. A draft model would need user code.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

from specq.protocol import ConfigError

CONTEXT = 2048
HOW_TO_GET = (
    "llama-cpp-python is not here. It compiles llama.cpp for this processor, with a C++ compiler, in about ten "
    "minutes:\n"
    "    .venv/bin/pip install -e '.[rivals]'   (in a clone of specq)\n"
    "Where llama.cpp then ends with a segmentation fault (seen with its AMX code in a virtual machine), name the "
    "processor's\n"
    "other extensions: CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON'\n"
    "pip install --no-cache-dir --force-reinstall llama-cpp-python"
)
GREEDY = {"temp": 0.0}
FASTEST = "Q4_0"  # llama.cpp repacks it for the processor's widest instructions


class LlamaCpp:
    """A model, loaded once; `num_lookup`: tokens that its prompt lookup drafts a round, 0: no lookup."""

    def __init__(self, model: str, num_threads: int, num_lookup: int = 0) -> None:
        """Load the model; raises ConfigError if the package is not installed."""
        try:
            from llama_cpp import Llama
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
        except ImportError:
            raise ConfigError(HOW_TO_GET) from None
        draft = LlamaPromptLookupDecoding(num_pred_tokens=num_lookup) if num_lookup else None
        threads = {"n_threads": num_threads, "n_threads_batch": num_threads}
        self._model: Any = Llama(model, n_ctx=CONTEXT, n_batch=CONTEXT, verbose=False, draft_model=draft, **threads)

    def complete(
        self, token_ids: Sequence[int], max_tokens: int, temperature: float, seed: int, *, ignore_eos: bool
    ) -> dict[str, Any]:
        """Return the tokens and the seconds to the first and to the last; sampling uses the whole distribution."""
        self._model.reset()
        self._model.set_seed(seed)
        sampling = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature > 0 else GREEDY
        found: list[int] = []
        first, started = 0.0, time.perf_counter()
        for token in self._model.generate(list(token_ids), **sampling):
            found.append(token)
            first = first or time.perf_counter() - started
            if len(found) == max_tokens or (not ignore_eos and token in self._endings):
                break
        return {"token_ids": found, "num_first": 1, "first_s": first, "seconds": time.perf_counter() - started}

    @property
    def _endings(self) -> set[int]:
        return {self._model.token_eos()}


def in_fastest_format(model: str, directory: str) -> str:
    """Return a copy of a GGUF file in FASTEST, which llama.cpp writes itself; raises ConfigError if it fails."""
    import llama_cpp

    path, wanted = f"{directory}/{FASTEST}.gguf", llama_cpp.llama_model_quantize_default_params()
    wanted.ftype, wanted.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    if llama_cpp.llama_model_quantize(model.encode(), path.encode(), ctypes.byref(wanted)):
        raise ConfigError(f"llama.cpp cannot write {model} as {FASTEST}")
    return path


def is_installed() -> bool:
    """Return whether llama-cpp-python is installed."""
    from importlib.util import find_spec

    return find_spec("llama_cpp") is not None and os.name == "posix"
