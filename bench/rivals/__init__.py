"""The parts of `specq bench rivals`: specq beside transformers and llama.cpp on the same cores.

    transformers   `generate` and assisted generation, in the process that loads it
    llama          llama.cpp through llama-cpp-python, likewise
    children       a rival in a process of its own (`python -m bench.rivals.children`), asked by lines of JSON
    field          who takes part: the rivals' processes and specq's, started and stopped
    grid           cells of temperature and sessions, and the turns in them
    prefill        how fast a long prompt is computed
    memory         what each process takes
    summary        paired ratios, and what was asked of them

Rule: rivals run at their best, and whoever is not asked sleeps. A completion's rate counts the tokens after the first
ones and the seconds after them; prompts have a measurement of their own. So it does not matter who has a prompt in
memory.
"""
