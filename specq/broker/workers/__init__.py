"""The broker's work on workers: which are present, and which jobs they have.

- `presence`: registers workers, reads heartbeats, notices losses. It also checks sessions and unserved jobs.
- `placement`: gives sessions to verifiers, and binds each job to its verifier in the journal.
- `policy`: pure functions that choose verifiers, find jobs that crash verifiers, and find missing sessions.
- `assignment`: gives drafters to sessions, and forwards the hidden states that they read.
- `tokenizers`: the tokenizers of the served models.
"""
