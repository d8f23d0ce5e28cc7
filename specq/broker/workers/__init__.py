"""What the broker does with workers: who is there, and who works on what.

presence     how they register, beat and are lost; whether sessions arrive; what nobody has
placement    sessions to verifiers, and which verifier holds a job, as the journal has it
policy       which verifier, which jobs crash verifiers, what is missing: pure functions
assignment   drafters to sessions, and the hidden states that they read
tokenizers   the tokenizers of the served models
"""
