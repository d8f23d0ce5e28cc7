"""The parts of `specq bench gpu`.

workload   the pair of models and the prompts that all contestants get, and the loads: sessions and temperature
streams    what users see of completions: rates, first tokens, times between tokens
method_serving   ways to draft in the verifier's process, each on a verifier of its own
serving    specq's deployments, over sockets; listening: the client that notes when tokens arrive
far        draft workers on this machine's cores behind a slow network, in turns with plain decoding
vllm       vLLM, in a process of its own
contest    one contestant after the other, and the options that say which
table      rows for the screen, and figures for the report
"""
