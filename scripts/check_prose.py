"""Check the English of README, docs, help texts and docstrings: long sentences, and phrases that the team avoids.

.venv/bin/python scripts/check_prose.py

Prints each finding as FILE:LINE and exits with 1 if there is one. The limits and the phrases are constants below. A
sentence ends with . ! or ?, an empty line, or the start of a list item, table row or aligned entry of a docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_WORDS = 40  # in a sentence of other docs and docstrings
MOST_WORDS_FOR_USERS = 30  # in README, guides and help texts
FOR_USERS = ("README.md", "docs/guides/", "specq/cli/", "specq/config/")
SKIPPED = ("docs/LOG.md", "docs/log/", "docs/results/", "docs/plots/", "CHANGELOG.md")
PHRASES = re.compile(
    r"\b([Ww]hoever|[Ww]hatever|so (?:many|few|much)|[Nn]obody|[Ee]verybody|of which|those that|the one that|hears?"
    r"|heard|tells?|told|is said|(?<![Tt]here )(?:is|are) (?:none|no(?! longer| more))|taken? for|gives? way)\b"
)
NOT_PROSE = re.compile(r"```.*?```|^    [^\n]*$|`[^`\n]*`|<[^>\n]+>|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE)
ENDS = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n|\n\s*(?:[-*|]|\d+\.)\s*|\n(?=\S.*?\S {2,}\S)|\|")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def findings(text: str, most: int) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each sentence of more than `most` words, and of each avoided phrase."""
    prose = NOT_PROSE.sub(lambda found: " x " + "\n" * found[0].count("\n"), text)
    start = 0
    for end in [*(found.end() for found in ENDS.finditer(prose)), len(prose)]:
        sentence = prose[start:end]
        line = prose.count("\n", 0, end - len(sentence.lstrip())) + 1
        if (count := len(WORD.findall(sentence))) > most:
            yield line, f"{count} words, at most {most}: {' '.join(sentence.split())[:80]}"
        start = end
    for found in PHRASES.finditer(prose):
        yield prose.count("\n", 0, found.start()) + 1, f"avoid {found[0]!r}"


def texts(path: Path, *, has_messages: bool) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, each with its first line: a page, or docstrings, with strings if `has_messages`."""
    content = path.read_text("utf-8")
    if path.suffix == ".md":
        yield 1, content
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node)) is not None:
                yield node.body[0].lineno, text
        elif has_messages and isinstance(node, ast.Dict | ast.Call):
            parts = node.values if isinstance(node, ast.Dict) else [*node.args, *(word.value for word in node.keywords)]
            for value in parts:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.lineno, value.value


def main() -> int:
    """Print the findings in all files; return 1 if there is one."""
    found = 0
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("specq/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        is_for_users = name.startswith(FOR_USERS)
        for first, text in () if name.startswith(SKIPPED) else texts(path, has_messages=is_for_users):
            for line, problem in findings(text, MOST_WORDS_FOR_USERS if is_for_users else MOST_WORDS):
                sys.stdout.write(f"{name}:{first + line - 1}: {problem}\n")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
