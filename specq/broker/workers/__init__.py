"""Workers at the broker: who is there, and who works on what.

registry     the registered workers; registration: how they register
heartbeats   whether they are alive and have their sessions; reconcile: what is missing, as a pure function
placement    sessions to verifiers; policy: which one; quarantine: jobs that crash verifiers
bindings     which verifier holds a job, as the journal has it; confirmation: whether sessions arrive there
assignment   drafters to sessions
tokenizers   the tokenizers of the served models; status: what `specq status` shows
"""
