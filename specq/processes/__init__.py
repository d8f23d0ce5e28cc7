"""The processes: each is a socket loop around one library object. `specq up` starts them all on one machine.

    broker, target, draft, gateway   one role each; `run` returns an exit status
    deployment                       chooses drafting methods and CPU cores for `specq up`
    up                               `specq up`: starts and supervises all processes
    servers                          the same on a free port, for a demo, a chat or a benchmark

In: a section of the configuration. Out: an exit status.
"""
