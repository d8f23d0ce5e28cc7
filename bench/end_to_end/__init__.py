"""The parts of `specq bench gpu`.

workload   the pair of models and the prompts of all contestants, and the loads: sessions and temperature.
streams    what users see of completions: rates, first tokens, times between tokens; the client that notes them.
method_serving   ways to draft in the verifier's process, each on a verifier of its own.
serving    specq's deployments, over sockets.
far        draft workers on this machine's cores behind a slow network, in turns with plain decoding.
vllm       vLLM, in a separate process.
contest    one contestant after the other, and the options that choose them.
table      rows for the screen, and figures for the report.
"""
