"""Everything that keeps the processes of a configuration from starting, found before any of them starts.

Rules: nothing is fetched, unpacked, loaded or imported. The list has the order in which a user acts. Other choices
(a model, an engine, an option) stand first, since they may make the rest needless; packages to install stand last.
`specq up`, `specq chat` and `specq doctor` all use this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

from specq.config import Config, own_options
from specq.drafting import PROPOSERS, ProposerSpec
from specq.engines import ENGINES, EngineSpec, check_no_gguf
from specq.models import find_model
from specq.processes.deployment import Hardware, models_of, placed
from specq.protocol import ConfigError
from specq.runtime import how_to_install


def check_can_start(asked: Config, machine: Hardware | None = None) -> None:
    """Raise ConfigError, which names all that is missing or wrong, unless the processes can start."""
    found = missing(placed(asked, machine))
    if len(found) > 1:
        lines = "\n".join(f"  {number}. {one}" for number, one in enumerate(found, 1))
        raise ConfigError(f"{len(found)} things are missing or wrong:\n{lines}")
    if found:
        raise ConfigError(found[0])


def missing(chosen: Config) -> list[str]:
    """Return what is missing or wrong for the processes of a placed configuration, one entry each.

    Raises ConfigError for an unknown engine or proposer.
    """
    engine: EngineSpec = ENGINES.resolve(chosen.target.engine)
    proposer: ProposerSpec | None = PROPOSERS.resolve(chosen.draft.proposer) if chosen.up.drafters else None
    found = [*_wrong_models(chosen, engine, proposer), *_wrong_sources(chosen, engine)]
    found += _reasons(partial(own_options, chosen.target, engine.options, ENGINES.names()))
    if proposer:
        found += _reasons(partial(own_options, chosen.draft, proposer.options, PROPOSERS.names()))
    packages = (engine.package, proposer.package if proposer else "")
    found += (how_to_install(one) for one in packages if one and find_spec(one) is None)
    return list(dict.fromkeys(found))


def _wrong_models(chosen: Config, engine: EngineSpec, proposer: ProposerSpec | None) -> Iterator[str]:
    """Yield which models are not there, and which ones their engine or proposer does not load."""
    for name, role in models_of(chosen):
        yield from _reasons(partial(find_model, name, role))
    if not engine.takes_gguf:
        yield from _gguf(chosen.target.model, "target", f"the {chosen.target.engine} engine")
    if proposer and proposer.needs_model and not proposer.takes_gguf:
        yield from _gguf(chosen.draft.model, "draft", f"the {chosen.draft.proposer} proposer")


def _gguf(name: str, role: str, needed_by: str) -> list[str]:
    try:
        path = find_model(name, role)
    except ConfigError:
        return []  # is said already
    return _reasons(partial(check_no_gguf, path, needed_by, name))


def _wrong_sources(chosen: Config, engine: EngineSpec) -> Iterator[str]:
    """Yield which ways to draft in the verifier's process the engine does not support."""
    target = chosen.target
    if target.heads and not engine.takes_heads:
        yield f"the {target.engine} engine does not support heads: leave --heads out, or use the torch engine"
    if target.lookahead and not engine.takes_scratch:
        yield f"the {target.engine} engine does not support lookahead: leave --lookahead out, or use the torch engine"


def _reasons(attempt: Callable[[], object]) -> list[str]:
    """Return why something cannot be done, [] where it can."""
    try:
        attempt()
    except ConfigError as error:
        return [str(error)]
    return []
