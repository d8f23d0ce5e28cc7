"""Workers at the broker: who is there, and who works on what.

registry     the registered workers and whether they are alive
placement    sessions to verifiers; policy: which one; quarantine: jobs that crash verifiers
assignment   drafters to sessions
tokenizers   the tokenizers of the served models; status: what `specq status` shows
"""
