"""Every way to draft, each with a verifier of its own, beside plain decoding. All verifiers share one machine.

    plain               no speculation of any kind
    lookup              suffix decoding over the text itself
    suffix              the same, over the texts of ended jobs too
    lookahead           n-grams from the target's scratch rows
    draft-colocated     a draft model in the verifier's process
    draft-worker        the same draft model in a draft worker
    parallel-colocated, parallel-worker   likewise, with a draft model that predicts several tokens in one pass
    medusa, eagle3, block   heads or a block drafter in the verifier's process
    eagle3-suffix       an EAGLE-3 head and suffix decoding, in one tree
    everything          all methods at once

Rule: a method's drafts are always used, and no other source drafts, so that the method alone is measured. With
`everything` the drafts that pay off are used (`drafts = "measured"`), as in service.

To add one: its name in KINDS, and a line in `_all`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.deployments import LOOKUP, PLAIN, deployment
from specq.checkpoints import draft_form, weight_bytes
from specq.config import Config
from specq.drafting.head_kinds import kind_of
from specq.models import HEADS, resolve_model
from specq.protocol import BLOCK, EAGLE, MEDUSA, ConfigError

DRAFT, EVERYTHING = "draft-colocated", "everything"
EAGLE_SUFFIX = "eagle3-suffix"
KINDS = {  # with what each needs
    PLAIN: "",
    LOOKUP: "",
    "suffix": "",
    "lookahead": "",
    DRAFT: "a draft model (--draft)",
    "draft-worker": "a draft model (--draft)",
    "parallel-colocated": "a parallel draft model (--parallel)",
    "parallel-worker": "a parallel draft model (--parallel)",
    MEDUSA: "Medusa heads (--heads)",
    EAGLE: "an EAGLE-3 head (--heads)",
    EAGLE_SUFFIX: "an EAGLE-3 head (--heads)",
    BLOCK: "a block drafter (--heads)",
    EVERYTHING: "",
}
SHARED_TOKENS = 100_000
ALONE: Mapping[str, Any] = {"drafts": "always", "prompt_lookup": "none"}


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """The files to draft with: names or directories, as a verifier accepts them; "" and () if missing.

    shared_tokens   tokens of ended jobs that `suffix` and `everything` keep.
    """

    draft: str = ""
    parallel: str = ""
    heads: tuple[str, ...] = ()
    shared_tokens: int = SHARED_TOKENS


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """One way to draft.

    kind      one of KINDS.
    name      the kind, with the heads' name if several are of that kind.
    target    options of its verifier.
    worker    the model of its one draft worker. "" for none.
    weights   the directories or files of its draft weights.
    """

    kind: str
    target: Mapping[str, Any] = field(default_factory=lambda: ALONE)
    worker: str = ""
    weights: tuple[Path, ...] = ()
    name: str = ""

    @property
    def mode(self) -> str:
        """The mode of its jobs."""
        return "plain" if self.kind == PLAIN else "async"

    @property
    def is_measured(self) -> bool:
        """Whether its verifier measures which drafts pay off."""
        return self.target.get("drafts") != "always"

    @property
    def num_bytes(self) -> int:
        """The size of its draft weights in their files, in bytes."""
        return sum(map(weight_bytes, self.weights))


def choose(files: DraftFiles, kinds: Sequence[str]) -> list[ServedMethod]:
    """Return plain decoding and the methods of these kinds, in the order of KINDS.

    Without kinds, return all methods whose files are given. Raises ConfigError for a kind without its files, and for
    files of another kind.
    """
    found = _named(list(_all(files)))
    for kind in kinds:
        if kind not in {method.kind for method in found}:
            raise ConfigError(f"the method {kind} needs {KINDS[kind]}")
    return [method for method in found if not kinds or method.kind in (PLAIN, *kinds)]


def config_of(method: ServedMethod, target: str) -> Config:
    """Return the deployment of a method: a broker without a journal, a verifier, and its draft worker if it has one."""
    return deployment(target, method.worker, int(bool(method.worker)), **method.target)


def _all(files: DraftFiles) -> Iterator[ServedMethod]:
    """Yield all methods whose files are given."""
    yield ServedMethod(PLAIN)
    yield ServedMethod(LOOKUP, {"drafts": "always"})
    yield ServedMethod("suffix", {"drafts": "always", "shared_tokens": files.shared_tokens})
    yield ServedMethod("lookahead", {**ALONE, "lookahead": True})
    for what, model in (("draft", files.draft), ("parallel", _checked_parallel(files.parallel))):
        if model:
            weights = (Path(resolve_model(model, "draft")),)
            yield ServedMethod(f"{what}-colocated", {**ALONE, "draft_model": model}, weights=weights)
            yield ServedMethod(f"{what}-worker", worker=model, weights=weights)
    heads = [(_kind_of(Path(resolve_model(name, HEADS))), name) for name in files.heads]
    for kind, name in sorted(heads, key=lambda one: list(KINDS).index(one[0])):
        weights = (Path(resolve_model(name, HEADS)),)
        yield ServedMethod(kind, {**ALONE, "heads": name}, weights=weights)
        if kind == EAGLE:
            together = {"drafts": "always", "shared_tokens": files.shared_tokens, "heads": name}
            yield ServedMethod(EAGLE_SUFFIX, together, weights=weights)
    yield _everything(files)


def _everything(files: DraftFiles) -> ServedMethod:
    """Return all methods in one deployment.

    The draft model and the first heads are in the verifier's process. If there is a parallel model, it has a draft
    worker.
    """
    target = {
        "shared_tokens": files.shared_tokens,
        "lookahead": True,
        "draft_model": files.draft,
        "heads": next(iter(files.heads), ""),
    }
    models = [resolve_model(name, "draft") for name in (files.draft, files.parallel) if name]
    weights = [*models, *(resolve_model(name, HEADS) for name in files.heads[:1])]
    return ServedMethod(EVERYTHING, target, files.parallel or files.draft, tuple(map(Path, dict.fromkeys(weights))))


def _named(methods: list[ServedMethod]) -> list[ServedMethod]:
    """Return the methods with their names. Raises ConfigError if two would have the same name."""
    kinds = [method.kind for method in methods]
    named = [
        replace(one, name=one.kind if kinds.count(one.kind) == 1 else f"{one.kind} {one.weights[0].name}")
        for one in methods
    ]
    names = [method.name for method in named]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two directories of heads would be called {twice[0]!r}; rename one")
    return named


def _kind_of(heads: Path) -> str:
    """Return the kind of heads in a directory; raises ConfigError for unusable heads."""
    kind = kind_of(heads)
    kind.check(heads)
    return kind.source


def _checked_parallel(model: str) -> str:
    """Return the name of a parallel draft model, "" for none.

    Raises ConfigError for a model that predicts only one token.
    """
    if model and draft_form.num_places(Path(resolve_model(model, "draft"))) == 1:
        raise ConfigError(
            f"{model} is not a parallel draft model: its config.json has no num_places of 2 or more; give it by "
            f"--draft, or train one (specq train parallel)"
        )
    return model
