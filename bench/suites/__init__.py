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
    "pair": "specq, transformers generate and assisted generation on one pair of models (the default).",
    "strategies": "Each strategy beside plain decoding and lookup alone.",
    "shapes": "Each shape of drafts beside plain decoding and lookup alone.",
    "methods": "Every way to draft beside plain decoding: tokens a round, what drafts cost, tokens/s; status 1 if a "
    "text differs.",
    "never-slower": "What the default makes of drafters, beside plain decoding, lookup alone and drafts that are "
    "always used.",
    "roundtrip": "What the broker adds to a round trip.",
    "broker-rate": "How many tokens a second pass through a broker on one core.",
    "gateway": "What the HTTP gateway adds to the Python client, and many streams at a time.",
    "lossless": "Whether drafts leave the text as it is, in many ways to serve; status 1 if they do not.",
    "numerics": "How often text depends on how a step was batched, by number format.",
    "steps": "What a verify step takes with an engine, by sessions and drafts.",
    "host-time": "What a step costs the host, by sessions and drafts: an engine whose forward pass takes no time.",
    "gpu": "specq end to end beside its rivals, one after the other, each filling the GPU.",
    "rivals": "specq beside transformers and llama.cpp on the processors of this machine.",
    "journal": "What the journal costs: groups of rows, and round trips with a journal and without.",
    "calibrate": "This machine and a pair of models, beside what the simulator predicts for them.",
}
DEFAULT = "pair"
