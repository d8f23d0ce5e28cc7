"""The parts of the vLLM engine; `specq.engines.vllm.engine` puts them together. vLLM is imported nowhere else.

`versions` says which vLLM is installed, before it is imported, and which was tested; `options` turns a verifier's
options into vLLM's own. Each session is one
long-lived request (`sessions`). In each of vLLM's workers (`workers` calls them, `worker` is one) specq judges what
vLLM's model runner computes. They receive the difference from the step before (`step_delta`). `patches` has what
replaces parts of vLLM. `client` uses its public API alone.
"""
