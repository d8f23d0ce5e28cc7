"""The processes: a socket loop around one library object each, and all of them together on one machine.

    broker, target, draft, gateway   a role each; `run` returns an exit status
    deployment                       who drafts where, and on which cores
    up                               `specq up`: starts them all
    servers                          the same on a free port, for a demo, a chat or a measurement

In: a section of the configuration. Out: an exit status.
"""
