"""What replaces parts of vLLM.

scheduler         vLLM's scheduler: steps are planned by the verifier
runner            sampling in vLLM's first model runner: specq judges the logits
batch_state       the runner's tables of its requests, kept up with arrays
token_injection   `_prepare_input_ids`: tokens that vLLM does not know of
decode_fast_path  `_prepare_inputs`: skipped where a batch of plain steps is unchanged
cuda_graphs       the dispatcher of CUDA graphs: more of them for steps of several rows a session
"""
