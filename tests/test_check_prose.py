"""`scripts/check_prose.py` finds long sentences and avoided phrases, with the line of each."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "check_prose.py"))


def test_long_sentences_and_avoided_phrases_are_found_with_their_lines():
    long = " ".join(["word"] * 31)
    text = (
        f"Short. Fine.\n\n{long}.\n- Nobody reads `of which`,\n  and so many do.\n\n```\n{long}\n```\nThere is no gap."
    )
    assert [line for line, _ in SCRIPT["findings"](text, 30)] == [3, 4, 5]
    assert [line for line, _ in SCRIPT["findings"](text, 31)] == [4, 5]


def test_a_file_gives_its_docstrings_and_help_texts(tmp_path: Path):
    path = tmp_path / "some.py"
    path.write_text('"""A module."""\n\nx = option(1, "Help of x.")\ny = {"y": "Help of y."}\nz = "no text"\n')
    docstring = (1, "A module.")
    assert list(SCRIPT["texts"](path, has_messages=False)) == [docstring]
    assert list(SCRIPT["texts"](path, has_messages=True)) == [docstring, (3, "Help of x."), (4, "Help of y.")]
