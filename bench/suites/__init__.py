"""The suites of `specq bench`: one file each, imported only when it is called.

In: options. Out: a table on the screen, and a `Report` in the file that `--out` names.
To add a suite: a file here whose `command` is a function that `bench.suite.suite` decorates, one line in `SUITES` and
one in `SUMMARIES`.
"""

SUITES = {
    "pair": "bench.suites.pair:command",
    "strategies": "bench.suites.grids:strategies_command",
    "shapes": "bench.suites.grids:shapes_command",
    "methods": "bench.suites.methods:command",
    "never-slower": "bench.suites.never_slower:command",
    "roundtrip": "bench.suites.roundtrip:command",
    "broker-rate": "bench.suites.broker_rate:command",
    "gateway": "bench.suites.gateway:command",
    "lossless": "bench.suites.lossless:command",
    "numerics": "bench.suites.numerics:command",
    "steps": "bench.suites.steps:command",
    "host-time": "bench.suites.host_time:command",
    "gpu": "bench.suites.gpu:command",
    "rivals": "bench.suites.rivals:command",
    "journal": "bench.suites.journal:command",
    "calibrate": "bench.suites.calibrate:command",
}
SUMMARIES = {
    "pair": "Compare specq with transformers, plain and assisted, on one model pair (the default).",
    "strategies": "Compare the verification strategies with plain decoding and lookup alone.",
    "shapes": "Compare the draft shapes with plain decoding and lookup alone.",
    "methods": "Compare all drafting methods with plain decoding: tokens per round, cost, tokens/s; status 1 if a text "
    "differs.",
    "never-slower": "Compare the default with plain decoding, lookup alone and drafts that are always used.",
    "roundtrip": "Measure the latency that the broker adds to a round trip.",
    "broker-rate": "Measure the tokens/s that a broker on one core can pass on.",
    "gateway": "Measure the latency that the HTTP gateway adds, and many concurrent streams.",
    "lossless": "Check that drafts do not change the text in many configurations; status 1 if they do.",
    "numerics": "Measure how often the text depends on the batch, by number format.",
    "steps": "Measure the time of a verification step, by sessions and drafts.",
    "host-time": "Measure the host time of a step, by sessions and drafts, with a forward pass of no time.",
    "gpu": "Compare specq with other engines end to end, one after another, each on the whole GPU.",
    "rivals": "Compare specq with transformers and llama.cpp on the CPUs of this machine.",
    "journal": "Measure the cost of the journal: groups of rows, and round trips with and without it.",
    "calibrate": "Compare this machine and a model pair with the predictions of the simulator.",
}
DEFAULT = "pair"
