"""Run the `specq` command as `python -m specq`."""

import signal

# Ctrl-C during the imports ends the process without a traceback. If SIGINT is ignored (nohup), it stays ignored.
_IS_DEFAULT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _IS_DEFAULT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from specq.cli import main  # noqa: E402

if _IS_DEFAULT:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on click reports the abort

if __name__ == "__main__":  # processes that vLLM spawns import this module again
    main(prog_name="specq")
