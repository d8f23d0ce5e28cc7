"""The broker's work on jobs: admission, committed tokens, delivery to readers.

- `intake`: requests of clients, the end of jobs, and what clients receive.
- `verdicts`: commits the tokens of a verdict, forwards it to drafters, and records it.
- `reports`: lists of jobs, traces, and the broker's state.
"""
