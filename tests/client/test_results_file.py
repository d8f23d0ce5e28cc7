"""A results file that is continued: cut anywhere, it ends as if it had not been cut."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

from specq.client import results_file
from specq.client.results_file import SUFFIX, ResultsFile
from specq.protocol.errors import ConfigError
from tests.each import each

PROMPTS = [f"prompt {i}" for i in range(1, 8)]
OPTIONS = {"temperature": 0.8, "stop": ("END",)}


class Stop(BaseException):
    """Ctrl-C."""


def results_of(prompt: str) -> bytes:
    """Return the results of a prompt, perhaps several."""
    return b"".join(b'{"of": "%s", "index": %d}\n' % (prompt.encode(), i) for i in range(int(prompt[-1]) % 3 + 1))


def write(path: Path, prompts: list[str] = PROMPTS, stop_after: int = 99, **options: object) -> list[str]:
    """Write results, as `specq submit` does; return the prompts that were worked on, and raise Stop after some."""
    worked: list[str] = []
    with ResultsFile(path, OPTIONS | options) as file:
        for prompt in file.remaining(prompts):
            if len(worked) == stop_after:
                raise Stop
            file.write(results_of(prompt))
            worked.append(prompt)
    return worked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


WHOLE = b"".join(map(results_of, PROMPTS))


def test_a_whole_run_leaves_one_file(path: Path) -> None:
    """And is begun anew when it is run again."""
    for _ in range(2):
        assert write(path) == PROMPTS
        assert path.read_bytes() == WHOLE
        assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_stopped_run_is_gone_on_with(path: Path) -> None:
    """With the prompts that are left, under a new key, since its jobs were stopped too."""
    with pytest.raises(Stop):
        write(path, stop_after=3)
    keys = {line for line in Path(f"{path}{SUFFIX}").read_text().splitlines() if "key" in line}
    assert len(keys) == 2
    assert write(path) == PROMPTS[3:]
    assert path.read_bytes() == WHOLE


def test_an_interruption_keeps_all_written_results(tmp_path: Path) -> None:
    """Ctrl-C before any line of what writes the results of the third prompt: those that are there whole are not done
    again."""
    num_left = []
    for number in count(1):
        path, lines = tmp_path / f"{number}.jsonl", Interrupt(number)
        with suppress(Stop), ResultsFile(path, OPTIONS) as file:
            for i, prompt in enumerate(file.remaining(PROMPTS)):
                sys.settrace(lines if i == 2 else None)
                file.write(results_of(prompt))
        sys.settrace(None)
        if not lines.is_raised:
            break
        is_whole = path.read_bytes().startswith(b"".join(map(results_of, PROMPTS[:3])))
        num_left.append(len(write(path)))
        assert num_left[-1] == (4 if is_whole else 5)
        assert path.read_bytes() == WHOLE
    assert set(num_left) == {4, 5}


class Interrupt:
    """A trace function that raises before the line of this number in the file of results."""

    def __init__(self, left: int) -> None:
        self.left, self.is_raised = left, False

    def __call__(self, frame: FrameType, event: str, _: object) -> Interrupt | None:
        if frame.f_code.co_filename != results_file.__file__:
            return None
        self.left -= event == "line"
        if self.left == 0 and not self.is_raised:
            self.is_raised = True
            sys.settrace(None)
            raise Stop
        return self


def test_what_was_noted_of_results_that_never_came_counts_no_more(path: Path) -> None:
    """Not either where other results made the file as long in the next run, and were torn themselves."""
    found = []
    for data, size in ((b"a" * 20, 10), (b"b" * 25, 32)):
        with suppress(Stop), ResultsFile(path, OPTIONS) as file:
            found.append(file.num_done)
            for number, _ in enumerate(file.remaining(PROMPTS), file.num_done):
                file.write(b"." * 10 if number == 0 else data)
                if number == 1:
                    raise Stop
        os.truncate(path, size)
    with ResultsFile(path, OPTIONS) as file:
        found.append(file.num_done)
        list(file.remaining(PROMPTS))
    assert found == [0, 1, 1]
    assert path.read_bytes() == b"." * 10


def test_a_torn_file_is_mended(path: Path, tmp_path: Path) -> None:
    """Killed at any byte of either file, it goes on from the last prompt that is whole in both."""
    with pytest.raises(Stop):
        write(path, stop_after=5)
    results, log = path.read_bytes(), Path(f"{path}{SUFFIX}").read_bytes()
    num_left = set()
    for cut in range(0, len(results) + 1, 7):
        for log_cut in range(log.index(b"\n") + 1, len(log), 41):
            path.write_bytes(results[:cut])
            Path(f"{path}{SUFFIX}").write_bytes(log[:log_cut])
            num_left.add(len(write(path)))
            assert path.read_bytes() == WHOLE
    assert len(num_left) > 4


def test_a_killed_run_keeps_its_key(path: Path) -> None:
    """So that its jobs, which run on, are found again."""
    file = ResultsFile(path, OPTIONS)
    file.write(results_of(next(file.remaining(PROMPTS))))
    shutil.copytree(path.parent, path.parent.parent / "killed")
    with ResultsFile(path.parent.parent / "killed" / path.name, OPTIONS) as again:
        assert again.key == file.key
        assert list(again.remaining(PROMPTS)) == PROMPTS[1:]
    with pytest.raises(ConfigError, match="another specq submit"):
        ResultsFile(path, OPTIONS)
    file._file.close()
    file._log.close()


def test_a_file_of_another_run_is_refused_and_kept(path: Path) -> None:
    """Other options, other prompts: refused, and the file stays as it was."""
    with pytest.raises(Stop):
        write(path, stop_after=3)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"temperature was 0.8, and is 0.5 now.*delete"):
        write(path, temperature=0.5)
    with pytest.raises(ConfigError, match="top_k was 'not given'"):
        write(path, top_k=3)
    with pytest.raises(ConfigError, match="other prompts"):
        write(path, ["another", *PROMPTS[1:]])
    with pytest.raises(ConfigError, match="3 prompts, but there are only 2"):
        write(path, PROMPTS[:2])
    assert path.read_bytes() == before
    assert write(path) == PROMPTS[3:]
    assert path.read_bytes() == WHOLE


@each(
    "line",
    [
        {"size": "x"},
        {"size": 1},
        {"done": 1, "size": 1, "digest": "zz"},
        {"done": -1, "size": -5, "digest": ""},
        {"done": 1.5, "size": 1, "digest": ""},
    ],
)
def test_a_damaged_log_is_named(tmp_path, line):
    """Somebody edited it: the message says which file to delete."""
    path = tmp_path / "results.jsonl"
    with pytest.raises(Stop):
        write(path, stop_after=2)
    log = Path(f"{path}{SUFFIX}")
    with log.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")

    with pytest.raises(ConfigError, match="damaged log") as caught:
        write(path)
    assert str(log) in str(caught.value)
