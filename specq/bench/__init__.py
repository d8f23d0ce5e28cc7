"""Benchmarks: specq and its rivals on the same prompts, the same pair of models and the same cores, in one run.

    prompts       data sets by name or file
    contestants   who is measured: specq over its own processes (servers), transformers (rivals)
    measure       interleaved repetitions
    compare       do all say the same?
    report        medians, ratios, speculation figures: the JSON and the table
    grid          strategies or draft shapes (variants) side by side, on the pairs that the user names (pairs, drafts)
    roundtrip     what the broker adds to a round trip
    demo          what `specq demo` shows: a few prompts in colours, then with and without drafters
    delay_proxy   a slow network in front of a broker, as a process

Rule: a figure comes with what it was measured on (`machine`) and with all its repetitions, never the best alone.
"""
