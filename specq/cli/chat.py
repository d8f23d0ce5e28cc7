"""`specq chat`: a conversation with a model in the terminal.

If a running broker serves only other models than the requested one, the user chooses.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import click

from specq.chat import MOST_TOKENS, Chat, ChatSettings, pen_for, with_history
from specq.cli.options import key_options, section_options
from specq.cli.outputs import is_terminal, read_all, read_piped
from specq.cli.parameters import given, schema_option
from specq.cli.waiting import WaitReport, served_instead, wait_options
from specq.client import AsyncClient, Client, check_values
from specq.config import DEFAULT_BROKER, NO_MODEL, ClientConfig, Config, load, override, with_own
from specq.engines import ENGINES
from specq.protocol import ConfigError, JobError


def choose(model: str, served: Sequence[str], address: str) -> str:
    """Return which of the served models to use; "" to start processes for `model`.

    Raises click.Abort if the user gives up. Raises ConfigError without a terminal, or if no verifier can have this
    model.
    """
    note = served_instead(model, served, address)
    if not is_terminal():
        raise ConfigError(
            f"the broker at {address} does not serve the model {model!r}; {note}. Use one: --model {served[0]}. Or "
            f"start {model} as well: specq up --model {model} --broker tcp://127.0.0.1:PORT, then specq chat with the "
            "same --broker"
        )
    choices = [
        f"start {model} for this chat, on the same machine as the broker's processes",
        *(f"chat with {name}, which the broker serves" for name in served),
        "give up",
    ]
    click.echo(f"specq: the broker at {address} does not serve the model {model!r}; {note}", err=True)
    for number, text in enumerate(choices, 1):
        click.echo(f"  {number}  {text}", err=True)
    said: int = click.prompt("Which", type=click.IntRange(1, len(choices)), err=True)
    if said == len(choices):
        raise click.Abort
    return ["", *served][said - 1]


PROBE_S = 1.0  # time for a broker at the default address to reply
STDIN = "-"
STDERR = 2  # for the output of started processes; standard output is for answers


@click.command()
@click.argument("question", nargs=-1)
@click.option("--system", default="", help="System prompt.  [default: that of the chat template]")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.  [default: 0]")
@click.option("--seed", type=int, help="Random seed; the same seed gives the same text.  [default: random]")
@click.option("--mode", help="Drafting mode: async, sync, jit, or plain (no speculation).  [default: async]")
@click.option(
    "--max-tokens", type=int, default=MOST_TOKENS, show_default=True, help="Maximum number of tokens per answer."
)
@schema_option("each answer")
@click.option(
    "--model",
    help="Model to chat with, either served by the broker or to start.  [default: the served model, else smollm2]",
)
@click.option("--draft-model", help="Draft model for the started processes, or `none`.  [default: as specq up]")
@key_options(ENGINES.resolve("native").options, ("arithmetic",))
@section_options(ClientConfig)
@wait_options()
def chat(
    *,
    question: tuple[str, ...],
    config_file: str | None,
    system: str,
    model: str | None,
    draft_model: str | None,
    arithmetic: str | None,
    broker: str | None,
    keys: str | None,
    timeout_s: float | None,
    wait: bool,
    wait_seconds: float,
    **parameters: Any,
) -> None:
    """Chat with a model, or answer one QUESTION and exit.

    Piped text (specq chat "Sum this up:" < notes.txt) follows QUESTION, or replaces a - in it. Without QUESTION, the
    piped text is the question.

    Without a running broker and without --broker, this starts the processes of `specq up` and stops them after the
    chat. If a running broker serves other models, this asks which one to use.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # unwind, to stop all started processes
    settings = ChatSettings(given(parameters))
    settings.conversation.system = system
    check_values(settings.parameters)
    asked = _question(question)
    config = load(config_file)
    client = override(config.client, broker=broker, keys=keys, timeout_s=timeout_s)
    config = replace(
        config,
        client=client,
        target=override(config.target, **with_own({"model": model, "arithmetic": arithmetic}, ["arithmetic"])),
        draft=override(config.draft, model=NO_MODEL if draft_model == "" else draft_model),
    )
    starts = draft_model is not None or arithmetic is not None
    with ExitStack() as stack:
        answering = _answering(client, model or "", is_named=_is_named(client, broker), starts=starts)
        if answering is None:
            place = _start(config, stack)
        else:
            place = _connect(config, answering, wait_seconds if wait else 0.0)
        _talk(place, settings, asked, stack)


def _question(words: tuple[str, ...]) -> str:
    """Return the question from the command line and piped standard input; "" for a conversation."""
    if not words and is_terminal():
        return ""
    if not words:
        parts = [read_all()]
    elif STDIN in words:
        parts = [read_all() if word == STDIN else word for word in words]
    else:
        parts = [*words, read_piped(_to_stderr)]
    text = " ".join(parts).strip()
    if not text:
        raise click.UsageError("the question is empty; give text as QUESTION or on standard input")
    return text


# --- the deployment --------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The deployment that answers.

    client    the connection to its broker
    tend      checks the started processes
    arrived   reports that the model is served
    absent    the draft sources that the deployment does not have
    """

    client: AsyncClient
    tend: Callable[[], object] = bool
    arrived: Callable[[str], object] = bool
    absent: frozenset[str] = frozenset()


def _is_named(client: ClientConfig, broker: str | None) -> bool:
    """Return whether the user named a broker."""
    return broker is not None or client.broker != DEFAULT_BROKER or bool(client.keys)


def _answering(client: ClientConfig, model: str, *, is_named: bool, starts: bool) -> str | None:
    """Return which model of a running broker to use, "" for any; None to start processes.

    `is_named`: the user named the broker; `starts`: the user gave options for started processes.
    """
    if is_named:
        return model
    served = None if starts else _served_models(client)
    if served is None:  # no broker replies, or the user wants new processes
        return None
    if not model or model in served:
        return model
    return (served and choose(model, served, client.broker)) or None


def _served_models(client: ClientConfig) -> list[str] | None:
    """Return the names of the served models; None if no broker replies within PROBE_S."""
    with Client(client.broker, keys=client.keys, timeout_s=PROBE_S) as probe:
        try:
            return list(probe.status()["models"])
        except JobError:
            return None


def _connect(config: Config, model: str, wait_s: float) -> _Place:
    client = config.client

    def look() -> str:
        return served_instead(model, _served_models(client) or (), client.broker) if model else ""

    report = WaitReport(wait_s, look=look)
    connected = AsyncClient(
        client.broker, model=model, timeout_s=client.timeout_s, keys=client.keys, wait_s=wait_s, on_wait=report
    )
    return _Place(connected, arrived=report.is_served)


def _start(config: Config, stack: ExitStack) -> _Place:
    """Start a broker and its workers for this chat."""
    from specq.processes.deployment import absent_sources, check_can_start, notes, placed
    from specq.processes.servers import Servers, on_free_port  # here, since `--help` does not need it
    from specq.processes.up import telling

    check_can_start(config)
    started = time.monotonic()
    for line in notes(config):
        click.echo(f"specq: {line}", err=True)
    click.echo(f"specq: starting {placed(config).target.model} for this chat ...", err=True)
    servers = stack.enter_context(Servers(on_free_port(telling(config)), stdout=STDERR))
    servers.wait_ready(float("inf"), _to_stderr)
    click.echo(f"specq: ready after {time.monotonic() - started:.1f} s", err=True)
    client = AsyncClient(servers.address, timeout_s=config.client.timeout_s, keys=servers.keys)
    return _Place(client, servers.tend, absent=absent_sources(config))


# --- the conversation ------------------------------------------------------------------------------------------------


def _talk(place: _Place, settings: ChatSettings, question: str, stack: ExitStack) -> None:
    """Answer one question, or chat until the user ends the conversation."""
    pen = pen_for(sys.stdout)
    talking = Chat(place.client, settings, pen, _to_stderr if question else click.echo, place.tend)
    stack.callback(talking.close)
    served = talking.served()
    place.arrived(served.info.name)
    if question:
        talking.ask(question)
        return
    click.echo(f"{served.info.name}, {served.context_length} tokens of context; /help lists the commands, Ctrl-D ends")
    pen.legend(place.absent)
    talking.talk(with_history())


def _to_stderr(line: str) -> None:
    """Print a message on standard error, since standard output may go to a file."""
    click.echo(line, err=True)
