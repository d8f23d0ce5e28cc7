"""The broker's data: values and tables that its components work on.

- `memory`: the whole state, and the effects to carry out.
- `job`: a job. It has states. Its parts are transcript (tokens, counts, readers, drafters) and traces.
- `table`: all jobs, and which waiting job is next.
- `ledger`: which records of jobs the journal holds.
- `registry`: the registered workers.
- `rights`: what each key may do, and how much.

Rule: the state never imports a component (`gate`, `jobs/`, `workers/`, `core`).
"""
