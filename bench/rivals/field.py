"""Who takes part in `specq bench rivals`, by name.

transformers         `generate`
assisted             assisted generation with specq's draft model
llama.cpp 1, 2       with so many threads (the second: one a core)
llama.cpp lookup     with its bindings' prompt lookup, on all cores
plain, lookup        specq without drafters, on one verifier: no speculation at all; the verifier's lookups
worker               specq with a draft worker
colocated            specq with the draft model in the verifier's process
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bench.rivals.children import Child
from bench.rivals.llama import HOW_TO_GET, is_installed
from specq.client import Client
from specq.config import Config
from specq.models import resolve_model
from specq.processes.servers import Servers, pair_config
from specq.protocol import EngineError
from specq.runtime import available_cores
from specq.samples import Prompt

Tell = Callable[[str], None]

# How many draft workers specq's deployments have, and whether the verifier drafts with the draft model itself.
DEPLOYMENTS = {"alone": (0, False), "worker": (1, False), "colocated": (0, True)}
SPECQ = {"plain": "alone", "lookup": "alone", "worker": "worker", "colocated": "colocated"}  # the deployment of each
DEFAULTS = ("worker", "colocated")  # of specq's: those that measure what pays
RIVALS = ("transformers", "assisted")
NUM_LOOKUP = 2  # tokens of llama.cpp's lookup a round; 4 and 10 were slower


@dataclass(frozen=True, slots=True)
class Params:
    """How a text is completed."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """One text: its tokens, how many came first, and the seconds until these and until the last."""

    token_ids: Sequence[int]
    num_first: int
    first_s: float
    seconds: float
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second after the first ones; 0 where there are none."""
        later = len(self.token_ids) - self.num_first
        return later / (self.seconds - self.first_s) if later else 0.0


class Contestant(Protocol):
    """Somebody who completes prompts; `num_at_once` texts at a time."""

    name: str
    num_at_once: int

    def complete(self, prompt: Prompt, params: Params) -> Completed:
        """Complete one prompt."""
        ...


class Rival:
    """A contestant in a process of its own, one text at a time."""

    num_at_once = 1

    def __init__(self, name: str, child: Child, **options: Any) -> None:
        self.name, self._child, self._options = name, child, options

    def complete(self, prompt: Prompt, params: Params) -> Completed:
        """Complete one prompt."""
        found = self._child.complete(
            token_ids=list(prompt.token_ids),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            ignore_eos=params.ignore_eos,
            **self._options,
        )
        return Completed(
            **{name: found[name] for name in ("token_ids", "num_first", "first_s", "seconds")},
            rounds=found.get("rounds", 0),
        )


class Specq:
    """specq over its sockets; times are those at which a client has the tokens."""

    num_at_once = 1 << 10

    def __init__(self, name: str, client: Client, mode: str) -> None:
        self.name, self._client, self._mode = name, client, mode

    def complete(self, prompt: Prompt, params: Params) -> Completed:
        """Complete one prompt."""
        token_ids: list[int] = []
        num_first, first_s, rounds, started = 0, 0.0, 0, time.perf_counter()
        stream = self._client.stream(
            token_ids=list(prompt.token_ids),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            ignore_eos=params.ignore_eos,
            mode=self._mode,
        )
        for piece in stream:
            token_ids += piece.token_ids
            if token_ids and not num_first:
                num_first, first_s = len(token_ids), time.perf_counter() - started
            rounds = piece.result.stats["rounds"] if piece.result else rounds
        return Completed(token_ids, num_first, first_s, time.perf_counter() - started, rounds)


def complete_all(contestant: Contestant, prompts: Sequence[Prompt], params: Params, sessions: int) -> list[Completed]:
    """Complete the prompts, `sessions` at a time where the contestant can do so; results in their order."""
    with ThreadPoolExecutor(min(sessions, contestant.num_at_once)) as pool:
        return list(pool.map(lambda prompt: contestant.complete(prompt, params), prompts))


class Field:
    """The contestants, and the processes that complete for each of them."""

    def __init__(self) -> None:
        self.contestants: list[Contestant] = []
        self.about: dict[str, Any] = {}  # what rivals say of themselves
        self.processes: dict[str, dict[str, int]] = {}  # contestants of one set of processes -> process -> its number

    def of(self, names: Sequence[str]) -> list[Contestant]:
        """Return the contestants of these names, those that are there."""
        return [contestant for contestant in self.contestants if contestant.name in names]


def llama_names() -> dict[str, tuple[int, int]]:
    """Return llama.cpp's contestants: threads, and tokens of its lookup."""
    every = len(available_cores())
    plain = {f"llama.cpp {num}": (num, 0) for num in sorted({1, every})}
    return plain | {"llama.cpp lookup": (every, NUM_LOOKUP)}


def llama_on_all_cores() -> str:
    """Return the name of the contestant that specq is compared with."""
    return f"llama.cpp {len(available_cores())}"


def all_names() -> list[str]:
    """Return the names of all contestants."""
    return [*RIVALS, *llama_names(), *SPECQ]


@contextmanager
def field(names: Sequence[str], model: str, draft_model: str, tell: Tell) -> Iterator[Field]:
    """Start what the named contestants need, one after the other, and stop it all at the end."""
    found = Field()
    with ExitStack() as stack:
        if set(names) & set(RIVALS):
            _add_transformers(found, stack, names, model, draft_model)
        for name, (num_threads, num_lookup) in llama_names().items():
            if name in names and is_installed():
                _add_llama(found, stack, name, (resolve_model(model, "target"), num_threads, num_lookup), tell)
        for name in dict.fromkeys(SPECQ[name] for name in names if name in SPECQ):
            tell(f"starting specq ({name})")
            servers = stack.enter_context(Servers(deployment(name, model, draft_model)))
            servers.wait_ready()
            _add_specq(found, name, names, servers)
        yield found


def _add_transformers(found: Field, stack: ExitStack, names: Sequence[str], model: str, draft_model: str) -> None:
    child = stack.enter_context(Child("transformers", model, draft_model))
    found.about["transformers"] = child.wait_ready()
    found.contestants += [Rival(name, child, assisted=name == "assisted") for name in RIVALS if name in names]
    found.processes["transformers"] = {"transformers": child.pid}


def _add_llama(found: Field, stack: ExitStack, name: str, arguments: tuple[object, ...], tell: Tell) -> None:
    """Add one of llama.cpp's contestants; one that cannot complete a text here is left out, and said to be."""
    child = stack.enter_context(Child("llama.cpp", *arguments))
    try:
        about = child.wait_ready()
        child.complete(token_ids=[1, 2, 3], max_tokens=2, temperature=0.0, seed=0, ignore_eos=True)
    except EngineError as error:
        tell(f"{name} is left out: {error}\n{HOW_TO_GET}")
        return
    found.about[name] = about
    found.contestants.append(Rival(name, child))
    found.processes[name] = {name: child.pid}


def _add_specq(found: Field, name: str, names: Sequence[str], servers: Servers) -> None:
    own = [one for one, where in SPECQ.items() if where == name and one in names]
    found.contestants += [Specq(one, servers.client, "plain" if one == "plain" else "async") for one in own]
    found.processes[f"specq {name}"] = servers.pids()


def deployment(name: str, model: str, draft_model: str) -> Config:
    """Return the configuration of one of specq's deployments; no journal, as in other suites that compare decoding."""
    drafters, is_colocated = DEPLOYMENTS[name]
    config = pair_config(model, draft_model, drafters)
    target = replace(config.target, draft_model=draft_model if is_colocated else "")
    return replace(config, target=target, broker=replace(config.broker, journal="none"))
