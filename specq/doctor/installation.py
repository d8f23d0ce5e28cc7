"""The installation and the machine: packages, kernels, cores, memory, GPU, directories, ports.

Rule: a missing part is a line of the answer, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from specq.client import Client
from specq.config import ClientConfig, Config, cache_dir, connect_address, state_dir
from specq.doctor.checks import NOTE, OK, WRONG, Check, megabytes
from specq.models import PREFERRED, known_models
from specq.processes.up import keys_of_broker
from specq.protocol import ConfigError, JobError, parse_address
from specq.runtime import available_cores, available_memory, find_compiler, kernel_sources, library_or_reason
from specq.runtime.machine import cpu_model, describe, gpus
from specq.transport import listens

ENGINES = ("torch", "vllm")  # packages that run models which the native engine does not
ANSWER_S = 1.0
COMFORTABLE_CORES = 2


def look(config: Config) -> Iterator[Check]:
    """Yield the checks of this machine, for processes of this configuration."""
    versions = describe("specq doctor")["versions"]
    yield packages(versions)
    yield compiled_kernels()
    yield cores(len(available_cores()), cpu_model())
    yield memory(available_memory())
    yield accelerator(gpus(), has_cuda=has_cuda(versions))
    yield from (writable(name, path) for name, path in (("cache", cache_dir()), ("state", state_dir())))
    yield from broker_port(config)
    yield from broker_of_clients(config)
    yield http_port(config.serve.bind, is_taken=_is_taken(config.serve.bind))
    yield models_here()


def packages(versions: Mapping[str, str | None]) -> Check:
    """Check which models the installed packages can run."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if any(versions.get(name) for name in ENGINES):
        return Check("packages", OK, found)
    told = f"{found}; neither torch nor vllm: GGUF files on a CPU only"
    return Check("packages", NOTE, told, "for other models and GPUs: pip install 'specq[torch]'")


def compiled_kernels() -> Check:
    """Check that all C kernels are built, or can be built, and can be loaded."""
    sources = kernel_sources()
    reasons = [(source.name, found) for source in sources if isinstance(found := library_or_reason(source), str)]
    if not reasons:
        return Check("kernels", OK, f"{len(sources)} built by {find_compiler()} and loaded")
    name, reason = reasons[0]
    advice = (
        "install gcc or clang"
        if not find_compiler()
        else "see the compiler's message; or set SPECQ_CACHE to another place"
    )
    return Check("kernels", WRONG, f"{len(reasons)} of {len(sources)} are missing; {name}: {reason}", advice)


def cores(number: int, processor: str) -> Check:
    """Check that the target and draft workers can have separate cores."""
    found = f"{number}, {processor}"
    if number >= COMFORTABLE_CORES:
        return Check("cores", OK, found)
    return Check("cores", NOTE, found, "all processes share it; only the verifier's own process drafts")


def memory(num_bytes: int | None) -> Check:
    """Report the free memory."""
    if num_bytes is None:
        return Check("memory", NOTE, "the free memory is unknown on this system")
    return Check("memory", OK, f"{megabytes(num_bytes)} free")


def has_cuda(versions: Mapping[str, str | None]) -> bool:
    """Return whether torch would compute on an NVIDIA GPU."""
    if not versions.get("torch"):
        return False
    from specq.engines.torch import pick_device

    return pick_device("auto").type == "cuda"


def accelerator(names: list[str], *, has_cuda: bool) -> Check:
    """Check that an existing GPU can be used."""
    if not names:
        return Check("GPU", OK, "none; the CPU computes")
    found = ", ".join(names)
    if has_cuda:
        return Check("GPU", OK, found)
    return Check(
        "GPU", NOTE, f"{found}; torch does not see it", "install a CUDA build of torch; until then specq uses the CPU"
    )


def writable(name: str, directory: Path) -> Check:
    """Check that files can be written below a directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryFile(dir=directory) as file:
            file.write(b"specq")
    except OSError as error:
        advice = f"make it writable, or set another directory: SPECQ_{name.upper()}"
        return Check(name, WRONG, f"{directory} cannot be written: {error.strerror}", advice)
    return Check(name, OK, f"{directory} can be written")


def _is_taken(bind: str) -> bool:
    address = parse_address(bind)
    return address.is_tcp and not address.is_any_port and listens(connect_address(bind))


def broker_port(config: Config) -> Iterator[Check]:
    """Check that a broker can listen at its address, or that a broker does already. Then say who drafts for whom."""
    bind = config.broker.bind
    if not _is_taken(bind):
        yield Check("broker", OK, f"{bind} is free")
        return
    workers = _workers_of(connect_address(bind), keys_of_broker(config.broker))
    if workers is None:
        advice = "stop it, or give the broker another address: specq up --broker tcp://127.0.0.1:PORT"
        yield Check("broker", WRONG, f"{bind} is in use, and no broker with these keys replies there", advice)
        return
    yield Check("broker", OK, f"one is already at {bind}, with {_counted(workers)}", "specq status shows it")
    yield from who_drafts(workers)


def broker_of_clients(config: Config) -> Iterator[Check]:
    """Say which broker commands use here, if one was named (SPECQ_BROKER, [client]), and who drafts there for whom."""
    address = config.client.broker
    if address in (ClientConfig().broker, connect_address(config.broker.bind)):
        return
    workers = _workers_of(address, config.client.keys)
    if workers is None:
        found = f"commands use the one at {address} (SPECQ_BROKER or [client] names it), which does not reply"
        yield Check("broker", NOTE, found, "start or name another; one with keys needs `keys` in [client] of --config")
        return
    yield Check("broker", OK, f"commands use the one at {address}, with {_counted(workers)}", "specq status shows it")
    yield from who_drafts(workers)


def who_drafts(workers: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Say of each draft worker of a report for whom it drafts."""
    return [draft_worker(worker) for worker in workers if worker["role"] == "draft"]


def _counted(workers: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(workers)} worker{'s' * (len(workers) != 1)}"


def draft_worker(worker: Mapping[str, Any]) -> Check:
    """Say for whom a draft worker drafts, and how many of its tokens were accepted a second since it registered."""
    accepted, jobs = worker.get("metrics", {}).get("accepted_for", {}), worker.get("drafts_for", {})
    seconds = max(worker.get("registered_s_ago", 0.0), 1.0)
    told = [
        f"{verifier}: {jobs.get(verifier, 0)} jobs, {accepted.get(verifier, 0) / seconds:.1f} accepted tokens/s"
        for verifier in sorted({**accepted, **jobs})
    ]
    if told:
        return Check("drafting", OK, f"{worker['name']} drafts for {'; '.join(told)}, since it registered")
    reason = "it has no jobs: there are none, its tokenizer is another, or its drafts do not pay (specq top shows why)"
    return Check("drafting", NOTE, f"{worker['name']} drafts for nobody", reason)


def _workers_of(address: str, keys: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the workers of the running broker; None if no broker answers."""
    try:
        with Client(address, timeout_s=ANSWER_S, keys=keys) as client:
            workers: Sequence[Mapping[str, Any]] = client.status()["workers"]
            return workers
    except (JobError, ConfigError):
        return None


def http_port(bind: str, *, is_taken: bool) -> Check:
    """Check that the gateway can listen."""
    if not is_taken:
        return Check("HTTP", OK, f"{bind} is free")
    return Check(
        "HTTP",
        NOTE,
        f"{bind} is taken",
        "if that is not a gateway of specq, use another port: specq up --serve --bind tcp://127.0.0.1:PORT",
    )


def models_here() -> Check:
    """Report which named models are on this machine."""
    known = known_models()
    found = ", ".join(f"{model.name} {model.role}" for model in known if model.path)
    if any(model.name == PREFERRED and model.role == "target" and model.path for model in known):
        return Check("models", OK, found)
    return Check("models", NOTE, f"{found}; not {PREFERRED}", f"specq models pull {PREFERRED}")
