"""`python -m specq` is `specq`."""

from specq.cli import main

main(prog_name="specq")
