"""The methods of drafting, one line each: the drafter of a draft worker, and the source inside a verifier.

Rule: a module is imported only when it is chosen. So a process needs only the libraries of its own methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specq.config import OwnOptions
from specq.drafting.interface import Drafter
from specq.protocol import BLOCK, COLOCATED, EAGLE, GRAMMAR, LOOKAHEAD, MEDUSA, OF_ENGINE, SUFFIX
from specq.runtime import Table, resolve

if TYPE_CHECKING:
    from specq.verifier import DraftSource, Setup


class Method(NamedTuple):
    """A method; "" where a part is missing.

    drafter, spec  the name of its drafter for draft workers, and where its `DrafterSpec` is.
    source, make   the name of its source beside a verifier (`specq.protocol.origins`), and where its factory is. The
                   factory makes the source from a `Setup`. It returns None if the configuration does not ask for it.
    """

    drafter: str = ""
    spec: str = ""
    source: str = ""
    make: str = ""


METHODS = (  # a verifier asks its sources in this order
    Method(
        "draft-model",
        "specq.drafting.draft_model.spec:DRAFT_MODEL",
        COLOCATED,
        "specq.drafting.draft_model.making:make",
    ),
    Method(source=MEDUSA, make="specq.drafting.medusa.source:make"),
    Method("eagle3", "specq.drafting.eagle3.spec:EAGLE3", EAGLE, "specq.drafting.eagle3.source:make"),
    Method("block", "specq.drafting.block.spec:BLOCK_DRAFTER", BLOCK, "specq.drafting.block.source:make"),
    Method(source=OF_ENGINE, make="specq.drafting.of_engine.source:make"),
    Method("ngram", "specq.drafting.suffix.ngram:NGRAM", SUFFIX, "specq.drafting.suffix.source:make"),
    Method(source=LOOKAHEAD, make="specq.drafting.lookahead.source:make"),
    Method(source=GRAMMAR, make="specq.drafting.grammar.source:make"),  # continues the drafts of the others
    Method("vllm", "specq.drafting.vllm.spec:VLLM"),
)
DRAFTERS = Table(
    "proposer",  # the name of the option
    "specq.drafters",
    {method.drafter: method.spec for method in METHODS if method.drafter},
    former="specq.proposers",  # for one version
)
SOURCES = {method.source: method.make for method in METHODS if method.source}


def make_sources(setup: Setup) -> Iterator[DraftSource]:
    """Yield the sources that a verifier's configuration asks for, in the order in which they draft.

    Raises ConfigError if a source does not fit the target.
    """
    for name in SOURCES:
        source = resolve("draft source", SOURCES, name)(setup)
        if source is not None:
            yield source


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What is known about a drafter before it is loaded. A spec's module imports neither torch nor a model.

    make          makes the drafter from a model's directory or hub name and the keyword arguments that
                  `specq.processes.draft` names. It does the heavy imports.
    options       the keys of [draft.NAME], which `make` also takes as keyword arguments.
    needs_model   False: it drafts from the text alone. No model is loaded or warmed up.
    takes_heads   `make` also takes `heads`: a directory of heads for the model.
    reads_target  it reads a target's hidden states: the model is a directory of heads. `make` also takes the directory,
                  GGUF file or hub name of the `target`, and its `target_name`.
    package       what must be installed for `make` to work, besides what the engine needs. "": nothing more.
    takes_gguf    whether it loads GGUF files.
    """

    make: Callable[..., Drafter]
    options: type[OwnOptions] = OwnOptions
    needs_model: bool = True
    takes_heads: bool = False
    reads_target: bool = False
    package: str = ""
    takes_gguf: bool = True
