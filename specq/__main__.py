"""`python -m specq` is `specq`."""

import signal

# Whoever presses Ctrl-C while modules are imported wants no traceback; where it is ignored (nohup), it stays so.
_IS_DEFAULT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _IS_DEFAULT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from specq.cli import main  # noqa: E402

if _IS_DEFAULT:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on click says that the command was aborted

if __name__ == "__main__":  # the processes that vLLM spawns import this again
    main(prog_name="specq")
