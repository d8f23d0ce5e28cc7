"""Choices of `specq up`: where drafts are made, and which CPU cores each process gets. Checks before the start.

Rules for choices: an explicit setting is always used. If the number of draft workers is open, drafting happens at the
fastest place. This is a draft model in the verifier's process, which needs no messages and no second process. Draft
workers run on cores that the verifier does not need. `specq.verifier.control.policy` then measures which sources pay.

Rules for checks: `missing` finds all problems before any process starts. It does not fetch, unpack, load or import
anything. The list is in the order in which a user acts. Models, engines and options come first, since changing them
may solve the rest. Packages to install come last. `specq up`, `specq chat` and `specq doctor` use this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from specq.config import AUTO_DRAFTERS, MTP, NO_MODEL, Config, DraftConfig, TargetConfig, options_of, own_options
from specq.drafting import DRAFTERS, SAME, DrafterSpec, speculators_form
from specq.drafting.head_kinds import check_for_engine, own_heads
from specq.drafting.medusa import form as medusa_form
from specq.engines import ENGINES, EngineSpec, check_no_gguf
from specq.models import FALLBACK, HEADS, PREFERRED, default_model, draft_for, find_model, resolve_model
from specq.models.draft_choice import DraftChoice, choose_draft
from specq.protocol import COLOCATED, DRAFT_WORKER, LOOKAHEAD, ConfigError
from specq.runtime import available_cores, how_to_install
from specq.transport import own_keys


def check_can_start(asked: Config, machine: Hardware | None = None) -> None:
    """Raise ConfigError with all problems that keep the processes from starting."""
    found = missing(placed(asked, machine))
    if len(found) > 1:
        lines = "\n".join(f"  {number}. {one}" for number, one in enumerate(found, 1))
        raise ConfigError(f"{len(found)} things are missing or wrong:\n{lines}")
    if found:
        raise ConfigError(found[0])


def draft_section(config: Config) -> DraftConfig:
    """Return the section of draft workers. It names the target's model if their drafts need one and none is named."""
    draft = config.draft
    needs_target = draft.vocabulary != SAME or DRAFTERS.resolve(draft.proposer).reads_target
    return replace(draft, target=config.target.model) if needs_target and not draft.target else draft


def missing(chosen: Config) -> list[str]:
    """Return the problems of a placed configuration, one entry each.

    Raises ConfigError for an unknown engine or proposer.
    """
    engine: EngineSpec = ENGINES.resolve(chosen.target.engine)
    proposer: DrafterSpec | None = DRAFTERS.resolve(chosen.draft.proposer) if chosen.up.drafters else None
    found = [*_wrong_models(chosen, engine, proposer), *_wrong_sources(chosen, engine)]
    found += _reasons(partial(own_options, chosen.target, engine.options, ENGINES.names()))
    if proposer:
        found += _reasons(partial(own_options, chosen.draft, proposer.options, DRAFTERS.names()))
    packages = (engine.package, proposer.package if proposer else "", _needed_by_heads(chosen.target))
    found += (how_to_install(one) for one in packages if one and find_spec(one) is None)
    return list(dict.fromkeys(found))


def _wrong_models(chosen: Config, engine: EngineSpec, proposer: DrafterSpec | None) -> Iterator[str]:
    """Yield missing models, and models that their engine or proposer cannot load."""
    for name, role in models_of(chosen):
        wrong = _reasons(partial(find_model, name, role))
        yield from wrong
        if role == "target" and name == chosen.target.model and not wrong:
            how = chosen.target.device, chosen.target.dtype
            yield from _reasons(partial(engine.check, find_model(name, role), *how))
    if not engine.takes_gguf:
        yield from _gguf(chosen.target.model, "target", f"the {chosen.target.engine} engine")
    if proposer and proposer.needs_model and not proposer.takes_gguf:
        yield from _gguf(chosen.draft.model, "draft", f"the {chosen.draft.proposer} proposer")


def _gguf(name: str, role: str, needed_by: str) -> list[str]:
    try:
        path = find_model(name, role)
    except ConfigError:
        return []  # `_wrong_models` reports it
    return _reasons(partial(check_no_gguf, path, needed_by, name))


def _wrong_sources(chosen: Config, engine: EngineSpec) -> Iterator[str]:
    """Yield the configured drafting methods that the engine does not support."""
    target = chosen.target
    if target.heads and not (engine.takes_heads or engine.runs_heads):
        yield f"the {target.engine} engine does not support heads: leave --heads out, or use the torch engine"
    if target.heads == MTP and not engine.runs_heads:
        yield f"{target.model} is no directory with an MTP layer that specq computes (docs/heads.md): leave --heads out"
    if target.heads_tree and engine.runs_heads:
        yield f"the {target.engine} engine drafts no trees with heads, only chains: leave --heads-tree out"
    if target.heads not in ("", MTP) and engine.runs_heads:
        yield from _reasons(
            lambda: check_for_engine(find_model(target.heads, HEADS), find_model(target.model, "target"), target.model)
        )
    if target.lookahead and not engine.takes_scratch:
        yield f"the {target.engine} engine does not support lookahead: leave --lookahead out, or use the torch engine"


def _needed_by_heads(target: TargetConfig) -> str:
    """Return the package that heads need: none for Medusa heads in safetensors with an engine on a CPU."""
    if not target.heads or _reasons(partial(find_model, target.heads, HEADS)):
        return ""
    return "torch" if medusa_form.need_torch(Path(find_model(target.heads, HEADS))) else ""


def _reasons(attempt: Callable[[], object]) -> list[str]:
    """Return the reason why `attempt` fails, or [] if it succeeds."""
    try:
        attempt()
    except ConfigError as error:
        return [str(error)]
    return []


LEAST_CORES = 4  # least number of cores to reserve one for a draft worker
MOST_WORKERS = 2  # most draft workers that start by default
NOT_HOW = (
    "broker",
    "keys",
    "model",
    "name",
    "progress",
    "own",
    "target",
)  # keys of [draft] that do not request draft workers


@dataclass(frozen=True, slots=True)
class Hardware:
    """The CPU core ids of a machine, and whether it has a GPU."""

    cores: tuple[int, ...]
    has_gpu: bool = False


def this_machine() -> Hardware:
    """Return the hardware that this process may use. Detects NVIDIA GPUs by device files, without loading CUDA."""
    return Hardware(available_cores(), any(Path("/dev").glob("nvidia[0-9]*")))


@dataclass(frozen=True, slots=True)
class CoreShares:
    """The cores of each process, as indices into the machine's cores."""

    broker: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    drafters: tuple[tuple[int, ...], ...]


def divide_cores(num_cores: int, targets: int, drafters: int) -> CoreShares:
    """Divide the cores among the processes.

    The last quarter (at least one core) is for broker and drafters, one core each. The targets get the rest. All
    processes share a single core. Targets share cores if there are more targets than cores.
    """
    if num_cores <= 1:
        return CoreShares((0,), ((0,),) * targets, ((0,),) * drafters)
    num_small = min(max(drafters, 1), max(num_cores // 4, 1))
    large, small = range(num_cores - num_small), range(num_cores - num_small, num_cores)
    return CoreShares(
        broker=(small[-1],),
        targets=tuple(tuple(large[i::targets]) or (large[i % len(large)],) for i in range(targets)),
        drafters=tuple((small[i % num_small],) for i in range(drafters)),
    )


def placed(config: Config, machine: Hardware | None = None) -> Config:
    """Return the configuration with its models and drafting places filled in.

    No drafters start if they need a draft model and the target has none. By default, no drafters start without a key
    of their own. `machine`: None for this machine.
    """
    config = _with_own_heads(_without_no_model(_with_speculator(config)))
    model = config.target.model or default_model()
    draft = config.draft.model or drafted_by(config).model
    needs_model = DRAFTERS.resolve(config.draft.proposer).needs_model
    config = replace(config, target=replace(config.target, model=model), draft=replace(config.draft, model=draft))
    if needs_model and not draft:
        return _with_workers(config, 0)
    if config.up.drafters != AUTO_DRAFTERS:
        return config
    if _wants_workers(config.draft) or not (draft and needs_model):
        return _with_workers(config, MOST_WORKERS)
    most = 0 if _lacks_key(config) else MOST_WORKERS
    if not ENGINES.resolve(config.target.engine).colocates:
        return _with_workers(config, most)
    target = replace(config.target, draft_model=config.target.draft_model or draft)
    return _with_workers(replace(config, target=target), min(most, _spare_workers(machine or this_machine())))


def _with_speculator(config: Config) -> Config:
    """Return the configuration with the target that its model's directory names, if that is a head of `speculators`."""
    path = Path(config.target.model).expanduser()
    named = speculators_form.target_of(path) if config.target.model and path.is_dir() else ""
    if not named:
        return config
    if config.target.heads and Path(config.target.heads).expanduser() != path:
        raise ConfigError(
            f"target.model is a head for {named} ({path}), and target.heads names others; give one of them"
        )
    return replace(config, target=replace(config.target, model=named, heads=str(path)))


def _with_own_heads(config: Config) -> Config:
    """Return the configuration with the target's own MTP layer as its heads, if neither heads nor a draft model is set.

    The heads `mtp` stand for that layer beside a draft model, too, and the heads `none` for no heads.
    """
    target = config.target
    if target.heads == NO_MODEL:
        return replace(config, target=replace(target, heads="", heads_tree=""))
    if target.heads not in ("", MTP) or not ENGINES.resolve(target.engine).takes_heads:
        return config
    own = own_heads(target.model) if _is_its_directory(target.model) else ""
    if target.heads == MTP:
        return replace(config, target=replace(target, heads=own or MTP))
    if target.draft_model or config.draft.model:
        return config
    return replace(config, target=replace(target, heads=own, heads_tree=target.heads_tree if own else ""))


def heads_at(heads: str, target: str, named: str, engine: EngineSpec) -> str:
    """Return where a verifier's heads are: the directory of `heads`, or MTP if the engine itself runs that layer.

    `target`: where its checkpoint is; `named`: what messages call it. "": no heads. Raises ConfigError if there are
    none of this name, or if the engine does not run them.
    """
    if heads in ("", NO_MODEL) or (heads == MTP and engine.runs_heads):
        return "" if heads == NO_MODEL else heads
    found = own_heads(target) if heads == MTP else resolve_model(heads, HEADS)
    if not found:
        raise ConfigError(f"{named} has no MTP layer that specq computes (docs/heads.md): leave --heads out")
    if engine.runs_heads:
        check_for_engine(found, target, named, reads_values=True)
    return found


def _is_its_directory(model: str) -> bool:
    """Return whether a target's name means the directory of that name, and no model of ours or GGUF file."""
    return not _reasons(partial(find_model, model, "target")) and find_model(model, "target") == str(
        Path(model).expanduser()
    )


def drafts_itself(chosen: Config, asked: Config) -> bool:
    """Return whether the target's own MTP layer drafts, by default."""
    is_default = asked.target.heads in ("", MTP)
    return bool(chosen.target.heads) and is_default and chosen.target.heads == chosen.target.model


def drafted_by(config: Config) -> DraftChoice:
    """Return the draft model of a target if the configuration sets none.

    It is searched only where it may be used. Some proposers need heads or another kind of file as their model. They get
    only a named target's own.
    """
    config = _with_speculator(config)
    model, proposer = config.target.model or default_model(), DRAFTERS.resolve(config.draft.proposer)
    takes_any = proposer.needs_model and proposer.takes_gguf and not proposer.reads_target
    if not config.up.drafters or config.target.draft_model or not takes_any:
        return DraftChoice(draft_for(model))
    return choose_draft(model)


def _without_no_model(config: Config) -> Config:
    """Return the configuration with the draft model `none` carried out.

    There is no draft model in the verifier, and by default there are no draft workers. An explicit number of draft
    workers and other drafting methods stay.
    """
    if config.draft.model != NO_MODEL:
        return config
    config = replace(config, target=replace(config.target, draft_model=""), draft=replace(config.draft, model=""))
    if config.up.drafters != AUTO_DRAFTERS or not DRAFTERS.resolve(config.draft.proposer).needs_model:
        return config
    return _with_workers(config, 0)


def _wants_workers(draft: DraftConfig) -> bool:
    """Return whether the section [draft] requests draft workers by setting how they draft.

    Tables of proposers that are not chosen do not count.
    """
    default = DraftConfig()
    names = (f.name for f in fields(default) if f.name not in NOT_HOW)
    return any(getattr(draft, name) != getattr(default, name) for name in names) or bool(options_of(draft))


def _spare_workers(machine: Hardware) -> int:
    """Return the number of draft workers beside a verifier with its own draft model. 0 with a GPU, which is faster."""
    if machine.has_gpu or len(machine.cores) < LEAST_CORES:
        return 0
    return min(len(machine.cores) // LEAST_CORES, MOST_WORKERS)


def _lacks_key(config: Config) -> str:
    """Return the reason why a draft worker has no key, or ""."""
    try:
        own_keys(config.draft.keys, "draft") if config.draft.keys else None
    except ConfigError as error:
        return str(error)
    return ""


def _with_workers(config: Config, number: int) -> Config:
    return replace(config, up=replace(config.up, drafters=number))


def with_helpers(config: Config, cores: Sequence[int]) -> TargetConfig:
    """Return the target section, for a single target on the CPU with a helper thread on the broker's core.

    That core is mostly idle. While the target uses drafts of draft workers, it leaves the core to them.
    """
    target, is_alone = config.target, config.up.targets == 1
    takes_helpers = "helper_cores" in {f.name for f in fields(ENGINES.resolve(target.engine).options)}
    if not is_alone or not takes_helpers or target.cores or "helper_cores" in options_of(target):
        return target
    return replace(target, engine_options=(*target.engine_options, f"helper_cores={list(cores)}"))


def models_of(chosen: Config) -> list[tuple[str, str]]:
    """Return the models of a placed configuration, each with its role."""
    target, draft, proposer = chosen.target, chosen.draft, DRAFTERS.resolve(chosen.draft.proposer)
    heads = "" if target.heads == MTP else target.heads
    named = [(target.model, "target"), (target.draft_model, "draft"), (heads, HEADS)]
    if chosen.up.drafters and proposer.needs_model:
        named += [
            (draft.model, HEADS if proposer.reads_target else "draft"),
            (draft.heads, HEADS),
            (draft.target, "target"),
        ]
    return [(name, role) for name, role in named if name]


def absent_sources(asked: Config, machine: Hardware | None = None) -> frozenset[str]:
    """Return the well-known draft sources that the started deployment does not have."""
    chosen = placed(asked, machine)
    there = {DRAFT_WORKER: chosen.up.drafters, COLOCATED: chosen.target.draft_model, LOOKAHEAD: chosen.target.lookahead}
    return frozenset(source for source, is_there in there.items() if not is_there)


def notes(asked: Config, machine: Hardware | None = None) -> list[str]:
    """Return notes to the user about the choices of `placed`."""
    chosen, said = placed(asked, machine), list[str]()
    asked = _without_no_model(asked)
    if not asked.target.model and chosen.target.model != PREFERRED:
        said.append(
            f"{PREFERRED} is not on this machine (specq models pull {PREFERRED}); using the toy model {FALLBACK}"
        )
    engine = ENGINES.resolve(chosen.target.engine)
    without_keys = placed(replace(asked, draft=replace(asked.draft, keys="")), machine)
    if chosen.up.drafters < without_keys.up.drafters:
        said.append(f"no draft workers: {_lacks_key(asked)}")
    elif not engine.takes_heads and not asked.target.heads and own_heads(asked.target.model):
        how = "uses" if engine.runs_heads else "does not use"
        only = " only with --heads mtp" if engine.runs_heads else ""
        said.append(f"the {chosen.target.engine} engine {how} the MTP layer of {chosen.target.model}{only}")
    elif drafts_itself(chosen, asked):
        said.append(f"{chosen.target.model} drafts for itself, with its MTP layer (none: --heads none)")
    elif not (chosen.up.drafters or chosen.target.draft_model or chosen.target.heads) and asked.up.drafters:
        reason = drafted_by(asked).reason
        said.append(
            f"{chosen.target.model} has no draft model{reason and f' ({reason})'}: no drafters start, and the verifier "
            "drafts from repeated text"
        )
    if not asked.draft.model and chosen.draft.model and (reason := drafted_by(asked).reason):
        said.append(f"draft model: {chosen.draft.model}, {reason} (another: --draft-model; none: --draft-model none)")
    return said
