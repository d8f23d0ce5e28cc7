"""Measuring: the suites of `specq bench`, a report of one format each.

    suites        one file a suite: its options, what it measures, its table
    suite, report what suites have in common: the command around them with its options, and the report
    ratios        two reports of one suite side by side

specq beside other ways to serve the same prompts, in one run; suites are short files over these:

    scenario      what is asked (models, prompts, sessions, temperature, lengths), and what one completion gives
    contestants   who completes: specq over its own processes; rivals: transformers, llama.cpp, vLLM, in processes of
                  theirs
    deployments   specq's processes, by what drafts; started one by one, kept while they are asked for
    turns         interleaved repetitions: everybody on the same block, in rotating order
    figures       medians, paired ratios with intervals, speculation figures, and their table
    agreement     do all say the same?
    by_dataset    the same for each data set, and a plot of each
    accuracy      are the answers right? generated_code: runs code with its tests, in a process with limits
    tracking      a report as a run at Weights & Biases
    methods       the ways to draft, each a deployment; method_figures: what they cost and bring
    step_split    where the time of a verifier's steps went
    drafts        draft models that are worse than the bundled one

The rest, a suite each:

    lossless      drafts change speed and never text
    numerics      how often text depends on how a step was batched
    engine_steps  verify steps of any engine; device: what their kernels took
    end_to_end    specq's deployments and vLLM on one GPU
    broker_load, stubs   peers without a model, for the broker alone
    delay_proxy   a slow network in front of a broker, as a process
    calibrate     this machine and a pair, beside the simulator's prediction

In: options. Out: a table, and a report as JSON. To add a suite: see `bench.suites`.
Rule: a figure comes with what it was measured on and with all its repetitions, never the best alone.
"""
