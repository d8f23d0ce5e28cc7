"""`python -m specq` is `specq`."""

from specq.cli import main

if __name__ == "__main__":  # the processes that vLLM spawns import this again
    main(prog_name="specq")
