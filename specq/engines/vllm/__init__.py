"""The parts of the vLLM engine; `specq.engines.vllm.engine` combines them. Only this package imports vLLM.

- versions: which vLLM is installed, without importing it, and which versions were tested.
- options: turns a verifier's options into vLLM's own.
- sessions: each session is one long-lived request.
- workers, worker: calls to vLLM's worker processes, and the code that runs in each. There specq judges what vLLM's
  model runner computes.
- step_delta: what a worker receives: the difference from the step before.
- patches: replacements of parts of vLLM.
- client: a client that uses only vLLM's public API.
"""
