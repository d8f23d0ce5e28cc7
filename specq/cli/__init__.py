"""The command line: a file for commands that belong together. It is imported only when one of them is called, so that
`specq --help` is fast.

To add a command, add a click command of the same name to a file, and one line in `COMMANDS`.

Rule: an error that the user can correct exits with 2, any other failure with 1. Both print one line on standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from specq import __version__
from specq.cli.groups import LazyGroup
from specq.cli.outputs import unwritable_said

if TYPE_CHECKING:
    from specq.protocol import SpecqError

COMMANDS = {
    "chat": "specq.cli.chat:chat",
    "demo": "specq.cli.demo:demo",
    "doctor": "specq.cli.doctor:doctor",
    "up": "specq.cli.services:up",
    "ray": "specq.cli.ray:ray",
    "submit": "specq.cli.submit:submit",
    "jobs": "specq.cli.jobs:jobs",
    "results": "specq.cli.jobs:results",
    "cancel": "specq.cli.jobs:cancel",
    "status": "specq.cli.watching:status",
    "top": "specq.cli.watching:top",
    "trace": "specq.cli.watching:trace",
    "journal": "specq.cli.journal:journal",
    "keys": "specq.cli.keys:keys",
    "models": "specq.cli.models:models",
    "train": "specq.cli.train:train",
    "bench": "specq.cli.bench:bench",
    "simulate": "specq.cli.simulate:simulate",
    "serve": "specq.cli.services:serve",
    "broker": "specq.cli.services:broker",
    "worker": "specq.cli.services:worker",
}
SUMMARIES = {
    "chat": "Chat with a model in the terminal.",
    "demo": "Start a deployment, answer three prompts and measure the speedup.",
    "doctor": "Check this machine and a model pair; recommend a command.",
    "up": "Run a broker, verifiers and drafters on this machine.",
    "ray": "Run specq on a Ray cluster.",
    "submit": "Send prompts from a JSONL file; write results as JSONL.",
    "jobs": "List the jobs of a broker.",
    "results": "Print the results of jobs as JSONL.",
    "cancel": "Cancel jobs; keep the tokens generated so far.",
    "status": "Show the workers, jobs and counters of a broker once.",
    "trace": "Show the events of a job in all processes.",
    "top": "Watch workers, sessions, rates and faults live.",
    "journal": "Migrate, copy or check a journal of a broker.",
    "keys": "Create CURVE keys (encryption, roles) and API keys.",
    "models": "List, fetch or inflate models.",
    "train": "Train draft models, heads, or a target and its draft.",
    "bench": "Measure specq and other engines with one of several suites.",
    "simulate": "Simulate hardware, network and load under a virtual clock.",
    "serve": "Run the OpenAI-compatible HTTP gateway of a broker.",
    "broker": "Run the broker.",
    "worker": "Run one verifier or one draft worker.",
}


class _Specq(LazyGroup):
    """Turns errors of commands into one line and an exit status."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with unwritable_said():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        from specq.protocol import SpecqError  # imports NumPy, which `specq --help` does not need

        try:
            return _with_extras(super().invoke, ctx)
        except SpecqError as error:
            click.echo(f"specq: {error}", err=True)
            raise click.exceptions.Exit(exit_status(error)) from None


def _with_extras(call: Callable[[click.Context], object], ctx: click.Context) -> object:
    """Call; raise ConfigError with the install command if an optional package is missing."""
    try:
        return call(ctx)
    except ModuleNotFoundError as error:
        from specq.protocol import ConfigError
        from specq.runtime import EXTRAS, how_to_install

        if error.name not in EXTRAS:
            raise
        raise ConfigError(how_to_install(error.name)) from None


def exit_status(error: SpecqError) -> int:
    """Return 2 for an error that the user can correct (options, files, input), else 1."""
    from specq.protocol import ConfigError, JobError

    invalid_job = isinstance(error, JobError) and error.code == "invalid"
    return 2 if invalid_job or isinstance(error, ConfigError) else 1


@click.group(cls=_Specq, table=COMMANDS, summaries=SUMMARIES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specq")
def main() -> None:
    """Speculative decoding as a message queue.

    Draft workers guess tokens, verifiers check them with the target model, a broker routes messages.
    """
