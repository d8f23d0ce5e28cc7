"""The contestants of `specq bench rivals`, by name.

transformers         `generate`.
assisted             assisted generation with specq's draft model.
llama.cpp 1, 2       with this number of threads (the second: one a core).
llama.cpp lookup     with its bindings' prompt lookup, on all cores.
llama.cpp Q4_0       on all cores, with the model in the format that is fastest there.
plain, lookup        specq without drafters, on one verifier: without speculation, or with the verifier's lookups.
worker               specq with a draft worker.
colocated            specq with the draft model in the verifier's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from bench.deployments import NO_DRAFTS, PLAIN, Deployments, Specq, deployment, starter
from bench.rivals.children import Child
from bench.rivals.llama import FASTEST, HOW_TO_GET, is_installed
from bench.scenario import Completion, Settings
from bench.turns import Contestant
from specq.config import Config
from specq.models import resolve_model
from specq.processes.servers import Servers
from specq.protocol import EngineError
from specq.runtime import Tell, available_cores
from specq.samples import Prompt

# The number of draft workers of specq's deployments, and whether the verifier drafts with the draft model itself.
DEPLOYMENTS = {"alone": (0, False), "worker": (1, False), "colocated": (0, True)}
SPECQ = {"plain": "alone", "lookup": "alone", "worker": "worker", "colocated": "colocated"}  # the deployment of each
DEFAULTS = ("worker", "colocated")  # specq's contestants that measure which drafts pay off
RIVALS = ("transformers", "assisted")
LLAMA_FASTEST = f"llama.cpp {FASTEST}"
NUM_LOOKUP = 2  # tokens of llama.cpp's lookup a round; 4 and 10 were slower


class Rival:
    """A contestant in a separate process, one text at a time."""

    concurrency = 1

    def __init__(self, name: str, child: Child, **options: Any) -> None:
        self.name, self._child, self._options = name, child, options

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts."""
        return [self._complete(prompt, settings) for prompt in prompts]

    def _complete(self, prompt: Prompt, settings: Settings) -> Completion:
        given = {name: getattr(settings, name) for name in ("temperature", "seed", "ignore_eos")} | self._options
        found = self._child.complete(token_ids=list(prompt.token_ids), max_tokens=settings.output_len, **given)
        stats = {"rounds": found.get("rounds", 0)}
        return Completion(found["token_ids"], 1e3 * found["first_s"], stats, found["num_first"], found["seconds"])


class Field:
    """The contestants, and the processes that complete for each of them."""

    def __init__(self) -> None:
        self.contestants: list[Contestant] = []
        self.about: dict[str, Any] = {}  # the rivals' descriptions
        self.processes: dict[str, dict[str, int]] = {}  # contestants of one set of processes -> process -> its number


def llama_names() -> dict[str, tuple[int, int]]:
    """Return llama.cpp's contestants: threads, and tokens of its lookup."""
    every = len(available_cores())
    plain = {f"llama.cpp {num}": (num, 0) for num in sorted({1, every})}
    return plain | {"llama.cpp lookup": (every, NUM_LOOKUP), LLAMA_FASTEST: (every, 0)}


def llama_on_all_cores() -> str:
    """Return the name of the contestant that specq is compared with."""
    return f"llama.cpp {len(available_cores())}"


def all_names() -> list[str]:
    """Return the names of all contestants."""
    return [*RIVALS, *llama_names(), *SPECQ]


@contextmanager
def field(names: Sequence[str], model: str, draft_model: str, tell: Tell, arithmetic: str = "auto") -> Iterator[Field]:
    """Start the processes of the named contestants, one after the other, and stop them all at the end."""
    found = Field()
    with ExitStack() as stack:
        if set(names) & set(RIVALS):
            _add_transformers(found, stack, names, model, draft_model)
        for name, (num_threads, num_lookup) in llama_names().items():
            if name in names and is_installed():
                path = resolve_model(model, "target")
                _add_llama(found, stack, name, (path, num_threads, num_lookup, name == LLAMA_FASTEST), tell)
        wanted = list(dict.fromkeys(SPECQ[name] for name in names if name in SPECQ))
        tell(f"starting specq ({', '.join(wanted)})")
        deployments = stack.enter_context(Deployments())
        starters = {name: starter(partial(_config, name, model, arithmetic), draft_model) for name in wanted}
        for name, servers in deployments.serve(starters).items():
            _add_specq(found, name, names, servers)
        yield found


def _config(name: str, model: str, arithmetic: str, draft_model: str) -> Config:
    drafters, is_colocated = DEPLOYMENTS[name]
    own: dict[str, Any] = {} if arithmetic == "auto" else {"engine_options": (f"arithmetic={arithmetic}",)}
    return deployment(model, draft_model, drafters, draft_model=draft_model if is_colocated else "", **own)


def _add_transformers(found: Field, stack: ExitStack, names: Sequence[str], model: str, draft_model: str) -> None:
    child = stack.enter_context(Child("transformers", model, draft_model))
    found.about["transformers"] = child.wait_ready()
    found.contestants += [Rival(name, child, assisted=name == "assisted") for name in RIVALS if name in names]
    found.processes["transformers"] = {"transformers": child.pid}


def _add_llama(found: Field, stack: ExitStack, name: str, arguments: tuple[object, ...], tell: Tell) -> None:
    """Add one of llama.cpp's contestants; if it cannot complete a text here, leave it out and print a notice."""
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
    found.contestants += [
        Specq(one, servers.client, options=NO_DRAFTS if one == PLAIN else None, streams=True) for one in own
    ]
    found.processes[f"specq {name}"] = servers.pids()
