"""The parts of the vLLM engine; `specq.engines.vllm.engine` puts them together. vLLM is imported nowhere else.

`installed` says what is known of vLLM before it is imported, `names` which of its arguments a deployment may give; `versions` says
which vLLM was tested; `options` turns a verifier's options into vLLM's own. Each session is one long-lived request (`sessions`),
stepped by a scheduler of our own (`scheduler`, `room`), and in each of vLLM's workers (`workers` calls them, `worker` is one) specq
judges what vLLM's model runner computes (`runner`). They are told what is different from the step before (`plans`).
"""
