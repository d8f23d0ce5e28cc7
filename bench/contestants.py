"""Who is measured, by name.

transformers   transformers `generate`
assisted       transformers assisted generation
plain          specq without any speculation: no drafters, and no lookups by the verifier (`mode="plain"`)
plain-1        the same, one session at a time (where more are asked for)
lookup         specq without drafters, whose verifier drafts what the text repeats; on the same processes as `plain`
lookahead      specq without drafters, whose verifier always drafts by lookahead decoding and by nothing else (if asked for)
specq          specq with drafters, and lookups where they have sent nothing
random         specq with a drafter of random weights (if asked for)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from bench.settings import Completion, Settings
from specq.client import Client
from specq.processes.servers import Servers, pair_config
from specq.samples import Prompt

if TYPE_CHECKING:
    from bench.rivals.transformers import Rivals

RIVALS = ("transformers", "assisted")
NAMES = (*RIVALS, "plain-1", "plain", "lookup", "lookahead", "specq", "random")

# The processes that complete for each of specq's contestants; "alone" are those without drafters.
KINDS = {
    "plain-1": "alone",
    "plain": "alone",
    "lookup": "alone",
    "lookahead": "lookahead",
    "specq": "specq",
    "random": "random",
}
PLAIN = ("plain-1", "plain")
ALONE = ("alone", "lookahead")  # without drafters


class Contestant(Protocol):
    """Somebody who completes prompts."""

    name: str
    concurrency: int

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts, as many at a time as `concurrency` says; results in their order."""
        ...


class Specq:
    """specq, through a client, over the sockets."""

    def __init__(self, name: str, client: Client, concurrency: int, options: Mapping[str, Any] | None = None) -> None:
        """`options`: parameters of each job beside those that the settings give, as for `specq.Client.generate`."""
        self.name, self._client, self.concurrency = name, client, concurrency
        self._options = dict(options or {})

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, settings), prompts))

    def _complete(self, prompt: Prompt, settings: Settings) -> Completion:
        result = self._client.generate(
            token_ids=list(prompt.token_ids),
            max_tokens=settings.output_len,
            temperature=settings.temperature,
            seed=settings.seed,
            ignore_eos=settings.ignore_eos,
            **self._options,
        )
        return Completion(result.token_ids, result.stats["time_to_first_token_ms"], result.stats | result.internal)


class Field:
    """The contestants of a run, and the rivals' pair if it is loaded."""

    def __init__(self, contestants: list[Contestant], rivals: Rivals | None) -> None:
        self.contestants, self.rivals = contestants, rivals


def default_names(settings: Settings, *, random_draft: bool) -> tuple[str, ...]:
    """Return who takes part if nobody is named."""
    asked = {"plain-1": settings.concurrency > 1, "random": random_draft, "lookahead": False}
    skipped = {name for name, wanted in asked.items() if not wanted}
    return tuple(name for name in NAMES if name not in skipped)


@contextmanager
def field(names: Sequence[str], settings: Settings, tell: Callable[[str], None]) -> Iterator[Field]:
    """Start what the named contestants need; stop it all at the end."""
    with ExitStack() as stack:
        started = {kind: _start(kind, settings, stack) for kind in _kinds(names)}
        rivals = _load_rivals(names, settings, tell)
        for kind, servers in started.items():
            tell(f"waiting for specq's processes ({kind}) ...")
            servers.wait_ready(tell=tell)
        yield Field([_contestant(name, settings, started, rivals) for name in NAMES if name in names], rivals)


def _kinds(names: Sequence[str]) -> list[str]:
    """Return the sets of processes that are needed, in the order of NAMES."""
    return list(dict.fromkeys(KINDS[name] for name in NAMES if name in names and name in KINDS))


def _start(kind: str, settings: Settings, stack: ExitStack) -> Servers:
    drafters = 0 if kind in ALONE else settings.drafters
    draft_model = settings.draft_model
    if kind == "random":
        from bench.drafts import make_random_draft

        draft_model = stack.enter_context(TemporaryDirectory(prefix="specq-random-draft-"))
        make_random_draft(settings.draft_model, Path(draft_model))
    config = pair_config(settings.model, draft_model, drafters, settings.keys)
    if kind == "lookahead":
        config = replace(config, target=replace(config.target, lookahead=True, prompt_lookup="none", drafts="always"))
    return stack.enter_context(Servers(config))


def _load_rivals(names: Sequence[str], settings: Settings, tell: Callable[[str], None]) -> Rivals | None:
    if not set(RIVALS) & set(names):
        return None
    tell("loading the pair into transformers")
    from bench.rivals.transformers import Rivals

    return Rivals(settings.model, settings.draft_model)


def _contestant(name: str, settings: Settings, started: dict[str, Servers], rivals: Rivals | None) -> Contestant:
    if name in KINDS:
        concurrency = 1 if name == "plain-1" else settings.concurrency
        return Specq(name, started[KINDS[name]].client, concurrency, {"mode": "plain"} if name in PLAIN else None)
    from bench.rivals.transformers import Transformers

    assert rivals is not None, "they are loaded for whoever needs them"
    return Transformers(rivals, name, assisted=name == "assisted")
