"""Benchmarks: the suites of `specq bench`, each with a report in one format.

    suites        one file a suite: its options, what it measures, its table
    suite, report what suites share: the command around them with its options, and the report, alone or beside another

Some suites compare specq with other ways to serve the same prompts, in one run. They are short files over these:

    scenario      the request (models, prompts, sessions, temperature, lengths), and the result of one completion
    rivals        other systems: transformers, llama.cpp and vLLM, in processes of their own
    deployments   the systems that complete: specq's processes by their drafters. They start one by one, and run while
                  they are needed
    turns         interleaved repetitions: all contestants complete the same block, in rotating order
    figures       medians, paired ratios with intervals, speculation figures, and their table, also by data set
    agreement     whether all contestants give the same text
    accuracy      whether the answers are right
    generated_code  runs code with its tests, in a process with limits
    tracking      a report as a run at Weights & Biases
    methods       the ways to draft, each a deployment
    method_figures  what methods cost and gain
    step_split    how the time of a verifier's steps is spent
    drafts        draft models that are worse than the bundled one

The other modules serve one suite each:

    lossless      drafts change speed and never text
    engine_steps  verify steps of any engine
    device        the time of a device's kernels
    end_to_end    specq's deployments and vLLM on one GPU
    broker_load, stubs   peers without a model, for the broker alone
    delay_proxy   a slow network in front of a broker, as a process
    calibrate     this machine and a pair, beside the simulator's prediction

In: options. Out: a table, and a report as JSON. To add a suite: see `bench.suites`.
Rule: a figure comes with its conditions and with all its repetitions, never only the best one.
"""
