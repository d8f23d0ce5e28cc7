"""The command line: one file a command, imported only when it is called, so that `specq --help` answers in a blink.

To add a command: a file with a click command of the same name, and one line in `COMMANDS`.

Rule: what a user can set right exits with 2, any other failure with 1, both with one line on standard error.
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
    "up": "specq.cli.up:up",
    "submit": "specq.cli.submit:submit",
    "jobs": "specq.cli.jobs:jobs",
    "results": "specq.cli.results:results",
    "cancel": "specq.cli.cancel:cancel",
    "status": "specq.cli.status:status",
    "top": "specq.cli.top:top",
    "trace": "specq.cli.trace:trace",
    "keys": "specq.cli.keys:keys",
    "models": "specq.cli.models:models",
    "train": "specq.cli.train:train",
    "bench": "specq.cli.bench:bench",
    "simulate": "specq.cli.simulate:simulate",
    "serve": "specq.cli.serve:serve",
    "broker": "specq.cli.broker:broker",
    "worker": "specq.cli.worker:worker",
}
SUMMARIES = {
    "chat": "Chat with a model in the terminal.",
    "demo": "Show what `specq up` starts at work, and how fast it is.",
    "doctor": "Check this machine and a pair of models; say how to run it.",
    "up": "Run a broker, verifiers and what drafts for them on this machine.",
    "submit": "Send prompts from a JSONL file; write results as JSONL.",
    "jobs": "List the jobs of a broker.",
    "results": "Print the results of jobs as `specq submit` does.",
    "cancel": "Stop jobs; what they have generated stays.",
    "status": "Show what a broker sees: workers, jobs, counters.",
    "trace": "Show what happened to a job, in every process.",
    "top": "Watch workers, sessions, rates and faults as they are.",
    "keys": "Make CURVE and API keys: encryption, and who may do what.",
    "models": "List the models that specq knows; fetch or inflate them.",
    "train": "Train models: a target and its draft.",
    "bench": "Measure specq and its rivals, in one of several suites.",
    "simulate": "Simulate hardware, network and load under a virtual clock.",
    "serve": "Serve OpenAI's HTTP API in front of a broker.",
    "broker": "Run the broker.",
    "worker": "Run one target verifier or one draft worker.",
}


class _Specq(LazyGroup):
    """The errors of the commands become one line and an exit status."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with unwritable_said():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        from specq.protocol import SpecqError  # here, since it brings NumPy along, which `specq --help` does without

        try:
            return _with_extras(super().invoke, ctx)
        except SpecqError as error:
            click.echo(f"specq: {error}", err=True)
            raise click.exceptions.Exit(exit_status(error)) from None


def _with_extras(call: Callable[[click.Context], object], ctx: click.Context) -> object:
    """Call, and turn the absence of an optional package into ConfigError that says how to get it."""
    try:
        return call(ctx)
    except ModuleNotFoundError as error:
        from specq.protocol import ConfigError
        from specq.runtime import EXTRAS, how_to_install

        if error.name not in EXTRAS:
            raise
        raise ConfigError(how_to_install(error.name)) from None


def exit_status(error: SpecqError) -> int:
    """Return 2 for what the user can set right (options, files, input), else 1."""
    from specq.protocol import ConfigError, JobError

    invalid_job = isinstance(error, JobError) and error.code == "invalid"
    return 2 if invalid_job or isinstance(error, ConfigError) else 1


@click.group(cls=_Specq, table=COMMANDS, summaries=SUMMARIES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specq")
def main() -> None:
    """Speculative decoding as a message queue: draft workers guess, target verifiers check, a broker routes."""
