"""The parts of `specq bench gpu`.

workload   the pair of models and the prompts of all contestants, and the loads: sessions and temperature.
streams    what users see of completions: rates, first tokens, times between tokens.
method_serving   ways to draft in the verifier's process, each on a verifier of its own.
serving    specq's deployments, over sockets.
listening  the client that notes when tokens arrive.
far        draft workers on this machine's cores behind a slow network, in turns with plain decoding.
vllm       vLLM, in a separate process.
contest    one contestant after the other, and the options that choose them.
table      rows for the screen, and figures for the report.
"""
