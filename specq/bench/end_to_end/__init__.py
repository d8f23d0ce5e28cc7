"""The parts of `specq bench gpu`.

workload   the pair of models and the prompts that all contestants get
serving    specq's deployments, over sockets
rivals     those that load models into a process of their own: vLLM, transformers, and specq's models by themselves
children   each of those in such a process
table      rows for the screen, and figures for the report
"""
