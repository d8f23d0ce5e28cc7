"""Packed models: unpacked into the cache once, whole or not at all, and what is in the way is said."""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from specq import models
from specq.checkpoints import draft_form
from specq.cli import main
from specq.config import cache_dir
from specq.models import known_models, packed, resolve_model, tokenizer_of
from specq.models.packed import find_unpacked, is_packed, num_bytes, unpacked, unpacked_bytes
from specq.protocol import ConfigError
from tests.each import each

HOME = Path(models.__file__).parent
WEIGHTS = random.Random(7).randbytes(300_000)
TINY = {  # the weights by their hash: journals and verifiers know the pair by it
    "target": "117543c5d14dce288a2d473432c4cb4ff51ae3cb6cab210ee87aa885a658887f",
    "draft": "77432471490571a512a42b4507f1631ab1e739d572de78ff2123190e6502eef4",
}
SMOLLM2 = {  # draft models
    "smollm2": "93564058f298dc1bc496574118b28c31b247becbc2758ed3a2b85f3bd2dfe96b",
    "smollm2-parallel": "acf3003d756f161e5929126e0b79a3a379ec3f5e82a224e9b2e93bb543979bf9",
}
PATIENCE_S = 60


def write_model(folder: Path, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"vocab_size": 5}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.xz").write_bytes(lzma.compress(weights, check=lzma.CHECK_SHA256))
    return folder


@pytest.fixture
def model(own_cache, tmp_path):
    return write_model(tmp_path / "small" / "target")


def left_in_cache() -> list[str]:
    """The names of files in the cache, but for locks."""
    return sorted(path.name for path in cache_dir().rglob("*") if path.is_file() and path.name != ".lock")


def run(*code: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "\n".join(code)], text=True, stdout=subprocess.PIPE, **options)


# --- what is unpacked ---------------------------------------------------------------------------------------------


def test_a_packed_model_is_unpacked_once_byte_for_byte(model):
    place = Path(resolve_model(str(model), "target"))

    assert place.is_relative_to(cache_dir() / "models" / "small")
    assert place.name == "target", "which is what a checkpoint without a name is called"
    assert {file.name: file.read_bytes() for file in place.iterdir()} == {
        "config.json": b'{"vocab_size": 5}',
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
    }
    first = (place / "model.safetensors").stat()
    assert unpacked(model) == place
    assert (place / "model.safetensors").stat().st_ino == first.st_ino


def test_a_plain_model_is_used_as_it_is(model):
    """Also one that was trained anew beside its archive."""
    (model / "model.safetensors").write_bytes(b"trained anew")

    assert not is_packed(model)
    assert resolve_model(str(model), "target") == str(model)
    assert num_bytes(model) == len('{"vocab_size": 5}' + "{}" + "trained anew")
    assert not cache_dir().exists()


@pytest.mark.parametrize("changed", ["model.safetensors.xz", "config.json"])
def test_another_version_has_another_place(model, changed):
    first = unpacked(model)
    write_model(model, WEIGHTS[::-1] if changed.endswith("xz") else WEIGHTS)
    (model / "config.json").write_text('{"vocab_size": 6}' if changed == "config.json" else '{"vocab_size": 5}')
    second = unpacked(model)

    assert first != second
    assert (second / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (second / "model.safetensors").read_bytes() == WEIGHTS[:: -1 if changed.endswith("xz") else 1]
    assert (first / "model.safetensors").read_bytes() == WEIGHTS, "which another process may be using"


@each("size", [0, 1, 127, 128, 16_383, 16_384, 300_000])
def test_an_archive_says_how_large_it_is_unpacked(tmp_path, size):
    (tmp_path / "a.xz").write_bytes(lzma.compress(WEIGHTS[:size]))

    assert unpacked_bytes(tmp_path / "a.xz") == size


@pytest.mark.skipif(not shutil.which("xz"), reason="xz is not installed")
def test_an_archive_of_several_blocks_says_the_sum(tmp_path):
    (tmp_path / "a").write_bytes(WEIGHTS)
    subprocess.run(["xz", "--block-size=70000", str(tmp_path / "a")], check=True)

    assert unpacked_bytes(tmp_path / "a.xz") == len(WEIGHTS)


# --- several processes, and those that are killed ------------------------------------------------------------------


def test_processes_that_come_at_once_unpack_once(own_cache, tmp_path):
    """No process sees a partial model, or has it replaced while it reads."""
    model = write_model(tmp_path / "small" / "target", WEIGHTS * 30)
    code = (
        "import hashlib, pathlib, sys, time; from specq.models.packed import unpacked",
        f"print('ready', flush=True)\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.001)",
        f"file = unpacked(pathlib.Path({str(model)!r})) / 'model.safetensors'",
        "print(file.stat().st_ino, hashlib.sha256(file.read_bytes()).hexdigest())",
    )
    processes = [run(*code) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    (tmp_path / "go").touch()
    said = {process.communicate(timeout=PATIENCE_S)[0] for process in processes}

    assert [process.returncode for process in processes] == [0] * 4
    (same,) = said
    assert same.split()[1] == hashlib.sha256(WEIGHTS * 30).hexdigest()
    assert left_in_cache() == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_killed_process_leaves_no_partial_model_or_lock(model, tmp_path):
    """Neither half a model, nor a lock, nor, once the model is unpacked, what it had written."""
    code = (
        "import pathlib, shutil, time; from specq.models import packed",
        "def copy(archive, out, length=0):",
        "    out.write(archive.read(1000)); out.flush(); print('half', flush=True); time.sleep(600)",
        f"packed.shutil.copyfileobj = copy; packed.unpacked(pathlib.Path({str(model)!r}))",
    )
    process = run(*code)
    assert process.stdout.readline() == "half\n"
    assert "model.safetensors" in left_in_cache()
    assert find_unpacked(model) is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)

    assert find_unpacked(model) is None
    assert (unpacked(model) / "model.safetensors").read_bytes() == WEIGHTS
    assert left_in_cache() == ["config.json", "model.safetensors", "tokenizer.json"]


# --- damage, and places that cannot be written ---------------------------------------------------------------------


@each(
    ("name", "damage"),
    product(["model.safetensors", "config.json", "tokenizer.json"], [lambda _: None, lambda b: b[:-1]]),
)
def test_a_damaged_copy_is_made_again(model, name, damage):
    """One that was cut off, or is gone."""
    place = unpacked(model)
    whole = (place / name).read_bytes()
    (place / name).unlink()
    if left := damage(whole):
        (place / name).write_bytes(left)
    assert find_unpacked(model) is None

    assert unpacked(model) == place
    assert (place / name).read_bytes() == whole


@pytest.mark.parametrize("damage", ["a byte", "cut off", "empty", "something else", "two streams"])
def test_a_damaged_archive_is_named_and_no_file_is_kept(model, damage):
    archive = model / "model.safetensors.xz"
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    wrong = {"a byte": data, "cut off": data[:-40], "empty": b"", "something else": b"version https://git-lfs\n"}
    archive.write_bytes(wrong.get(damage) if damage in wrong else archive.read_bytes() + lzma.compress(b"more"))

    with pytest.raises(ConfigError, match=r"is damaged|a single xz stream"):
        unpacked(model)
    assert left_in_cache() == []


def test_a_full_disk_is_named_and_no_file_is_left(model, monkeypatch):
    def fill(_archive, out, _length):
        out.write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed.shutil, "copyfileobj", fill)
    said = r"cannot be unpacked into .*: No space left .* \(0.3 MB are needed\); set SPECQ_CACHE to another directory"
    with pytest.raises(ConfigError, match=said):
        unpacked(model)
    assert left_in_cache() == []


def test_commands_say_in_a_line_what_cannot_be_written(model, tmp_path):
    """A real limit of what a process may write, and a cache whose place is a file."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    command = f"from specq.cli import main; main(['models', 'pull', {str(model)!r}])"
    (tmp_path / "file").touch()
    for first, cache, reason in ((limit, "cache", "File too large"), ("", "file", "Not a directory")):
        process = run(first, command, stderr=subprocess.STDOUT, env=os.environ | {"SPECQ_CACHE": str(tmp_path / cache)})
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2, said
        assert f"{model} cannot be unpacked into {tmp_path / cache}/" in said
        assert f"{reason} (0.3 MB are needed); set SPECQ_CACHE to another directory" in said
        assert "Traceback" not in said
    assert left_in_cache() == []


def test_a_python_without_lzma_says_what_to_do(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lzma", None)

    with pytest.raises(ConfigError, match=r"without lzma; unpack by hand: xz -dk .*model\.safetensors\.xz"):
        unpacked(model)


# --- names, lists and what is bundled ------------------------------------------------------------------------------


@pytest.fixture
def pair(own_cache, tmp_path, monkeypatch):
    """A packed pair whose draft model has its target's tokenizer."""
    for role in ("target", "draft"):
        write_model(tmp_path / "home" / "small" / role)
    (tmp_path / "home" / "small" / "draft" / "tokenizer.json").unlink()
    monkeypatch.setattr(models, "_HOME", tmp_path / "home")
    return tmp_path / "home" / "small"


def test_lists_unpack_no_model_and_show_the_model_sizes(pair):
    def listed():
        return [(model.path, model.source, model.num_bytes) for model in known_models()]

    size = len(WEIGHTS) + len('{"vocab_size": 5}' + "{}")
    packed_ones = [(pair / "target", "bundled, packed", size), (pair / "draft", "bundled, packed", size - 2)]
    assert listed() == packed_ones
    assert not cache_dir().exists()
    place = Path(resolve_model("small", "target"))
    assert listed() == [(place, "bundled, unpacked", size), packed_ones[1]]


def test_a_tokenizer_is_found_without_unpacking(pair):
    assert tokenizer_of("small", "draft") == tokenizer_of("small", "target") == str(pair / "target")
    assert not cache_dir().exists()


@each("role", TINY)
def test_the_bundled_pair_is_what_it_was(role):
    """Its archives have a hash of what they hold, which unpacking checks; and what is unpacked has the hash of the
    weights as they were trained."""
    archive = HOME / "tiny" / role / "model.safetensors.xz"
    place = Path(resolve_model("tiny", role))
    reader = lzma.LZMADecompressor()
    reader.decompress(archive.read_bytes()[:1000])

    assert reader.check == lzma.CHECK_SHA256
    assert hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest() == TINY[role]
    card = (HOME / "tiny" / "README.md").read_text()
    assert f"{unpacked_bytes(archive):,} bytes, packed {archive.stat().st_size:,} |" in card


@each("name", SMOLLM2)
def test_the_draft_models_of_smollm2_are_what_they_were(name):
    """The parallel one has tensors of the other, whose copy is beside its own."""
    place = Path(resolve_model(name, "draft"))
    shape = draft_form.draft_shape(place)
    assert shape is not None
    owner, _ = draft_form.owner(place, shape)
    found = hashlib.sha256((place / draft_form.WEIGHTS).read_bytes()).hexdigest()
    assert (found, hashlib.sha256((owner / draft_form.WEIGHTS).read_bytes()).hexdigest()) == (
        SMOLLM2[name],
        SMOLLM2["smollm2"],
    )


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_a_model_takes_tensors_from_is_unpacked_beside_it(model, is_plain):
    sharing = write_model(model.parent / "parallel", WEIGHTS[:1000])
    (sharing / "config.json").write_text('{"shared": "../target"}')
    if is_plain:
        (sharing / "model.safetensors.xz").unlink()
        (sharing / "model.safetensors").write_bytes(WEIGHTS[:1000])
    assert is_packed(sharing)
    assert find_unpacked(sharing) is None
    place = unpacked(sharing)
    assert (place.name, find_unpacked(sharing)) == ("parallel", place)
    assert (place / "model.safetensors").read_bytes() == WEIGHTS[:1000]
    beside = place / "../target/model.safetensors"
    assert beside.read_bytes() == WEIGHTS
    beside.write_bytes(b"cut off")
    assert find_unpacked(sharing) is None
    assert (unpacked(sharing), beside.read_bytes()) == (place, WEIGHTS)
    write_model(model, WEIGHTS[::-1])
    assert unpacked(sharing) != place, "another version of the other model has another place"


@each("shared", ["../nowhere", "..", "../../small/target/../../else", "/", "."])
def test_only_a_model_beside_it_is_unpacked_with_a_model(model, shared):
    (model / "config.json").write_text(json.dumps({"shared": shared}))
    place = unpacked(model)
    assert [file.name for file in place.parent.iterdir() if file.is_dir()] == ["target"]


def test_the_command_unpacks_ahead_and_says_where(pair):
    outcome = CliRunner().invoke(main, ["models", "pull", "small"])

    assert (outcome.exit_code, outcome.stdout.strip()) == (0, str(find_unpacked(pair / "target")))


def test_the_command_refuses_an_unknown_name():
    """With those that it knows; a hub name has a slash."""
    outcome = CliRunner().invoke(main, ["models", "pull", "nosuch"])

    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert re.search(r"'nosuch' is neither a known model \(.*\) nor a path", outcome.stderr)


@pytest.mark.skipif(not (HOME.parents[1] / ".git").exists(), reason="not a clone")
def test_a_clone_stays_small():
    """Under 45 MB of files."""
    root = HOME.parents[1]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout
    files = [root / os.fsdecode(name) for name in listed.split(b"\0") if name]

    assert sum(file.stat().st_size for file in files if file.is_file()) < 45_000_000
