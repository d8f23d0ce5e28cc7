"""The suites of `specq bench`: one file each, imported only when it is called.

In: options. Out: a table on the screen, and a `Report` in the file that `--out` names.
To add a suite: a file here whose `command` is a function decorated by `bench.suite.suite`, one line in `SUITES` and one
in `SUMMARIES`.
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
    "grammars": "bench.suites.grammars:command",
    "steps": "bench.suites.steps:command",
    "host-time": "bench.suites.host_time:command",
    "gpu": "bench.suites.gpu:command",
    "rivals": "bench.suites.rivals:command",
    "calibrate": "bench.suites.calibrate:command",
}
SUMMARIES = {
    "pair": "specq, transformers generate and assisted generation on one pair of models (the default).",
    "strategies": "Each strategy beside plain decoding and lookup alone.",
    "shapes": "Each shape of drafts beside plain decoding and lookup alone.",
    "methods": "Every way to draft beside plain decoding: tokens a round, draft costs, tokens/s; status 1 if a "
    "text differs.",
    "never-slower": "The default with drafters beside plain decoding, lookup alone and drafts that are always used.",
    "roundtrip": "The cost of the broker in a round trip.",
    "broker-rate": "How many tokens a second pass through a broker on one core.",
    "gateway": "The cost of the HTTP gateway beside the Python client, and many streams at a time.",
    "lossless": "Whether drafts leave the text unchanged, in many ways to serve; status 1 if not.",
    "grammars": "Whether texts that follow a JSON schema are valid, for hundreds of schemas; status 1 if not.",
    "steps": "The time of a verify step with an engine, by sessions and drafts.",
    "host-time": "The cost of a step on the host, by sessions and drafts, with a free forward pass.",
    "gpu": "specq end to end beside its rivals, one after the other, because each fills the GPU.",
    "rivals": "specq beside transformers and llama.cpp on the processors of this machine.",
    "calibrate": "This machine and a pair of models, beside the simulator's prediction for them.",
}
DEFAULT = "pair"
