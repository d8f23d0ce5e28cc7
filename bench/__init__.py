"""Measuring: the suites of `specq bench`, a report of one format each.

    suites        one file a suite: its options, what it measures, its table
    suite, report what suites have in common: the command around them, and the report
    ratios        two reports of one suite side by side
    servers       specq's own processes: started, waited for, stopped
    machine       what a figure was measured on

specq and its rivals on the same prompts, the same pair of models and the same cores, in one run:

    prompts       data sets by name or file
    contestants   who is measured: specq over its own processes (servers), transformers
    measure       interleaved repetitions
    agreement     do all say the same?
    figures       medians, ratios, speculation figures, and their table
    grid          strategies or draft shapes (variants) side by side, on the pairs that the user names (pairs, drafts)
    rivals        specq, transformers and llama.cpp on processors, each rival in a process of its own
    never_slower  what the default makes of drafters: cells of models, drafters and sessions
    roundtrip     what the broker adds to a round trip
    demo          what `specq demo` shows: a few prompts in colours, then with and without drafters
    delay_proxy   a slow network in front of a broker, as a process

The rest, a suite each:

    lossless      drafts change speed and never text; lossless_tokens: token by token beside transformers' logits
    numerics      how often text depends on how a step was batched
    engine_steps  verify steps of any engine; chain_steps: chains of draft steps
    end_to_end    specq's deployments and its rivals on one GPU
    gpu           the parts of a step on that GPU by themselves
    journal_cost  what the journal costs
    calibrate     this machine and a pair, beside the simulator's prediction

In: options. Out: a table, and a report as JSON. To add a suite: see `bench.suites`.
Rule: a figure comes with what it was measured on and with all its repetitions, never the best alone.
"""
