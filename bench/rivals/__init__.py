"""The parts of `specq bench rivals`: specq beside transformers and llama.cpp on the same cores.

    transformers   `generate` and assisted generation, in the process that loads it
    llama          llama.cpp through llama-cpp-python, likewise
    children       a rival in a separate process (`python -m bench.rivals.children`) and its memory; lines of JSON
    field          the contestants: the rivals' processes and specq's, started and stopped
    grid           cells of temperature and sessions, the turns in them, and the speed of computing a long prompt
    summary        paired ratios, and their required values

Rule: rivals run at their best, and idle contestants sleep. A completion's rate counts the tokens after the first ones
and the seconds after them. Prompts have a separate measurement. So it does not matter which contestant has a prompt in
memory.
"""
