"""Replacements of parts of vLLM.

- scheduler: replaces vLLM's scheduler; the verifier plans the steps.
- runner: replaces sampling in vLLM's first model runner; specq judges the logits.
- batch_state: updates the runner's tables of its requests with arrays.
- token_injection: replaces `_prepare_input_ids`; adds tokens that vLLM does not know.
- decode_fast_path: replaces `_prepare_inputs`, skipped if a batch of plain steps is unchanged.
- drafter: calls vLLM's own drafter behind a judged step. drafter_gaps: of texts that it did not follow all the time.
- cuda_graphs: replaces the dispatcher of CUDA graphs. Adds graphs for steps with several rows per session.
"""
