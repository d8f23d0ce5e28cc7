"""Are the answers right? GSM8K's number is read out of the text; HumanEval's function is run with its tests.

Rule: a text is judged once, whoever said it, so contestants that say the same are right equally often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import dropwhile, takewhile
from textwrap import dedent
from typing import Any

from bench import sandbox
from bench.turns import Turn
from specq.protocol import ConfigError
from specq.samples import Prompt, Reference

_NUMBER = r"((?:(?<![\w)\]}])-)?(?:\$-?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+))"
_PLACES = tuple(re.compile(mark + _NUMBER) for mark in (r"####[\s*:=]*", r"\\boxed\{[^}]*?", ""))  # of the answer
_LATEX = {"{,}": ",", "\\,": "", "\\!": "", "\\$": "$", "\N{MINUS SIGN}": "-"}
_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"\s|$|(?:def|class|import|from)\s|@")  # begins a line of code outside of a fence

Right = dict[str, dict[str, list[int]]]  # data set -> contestant -> right answers of each repetition


def final_number(text: str) -> Decimal | None:
    """Return the last number behind `####`, else in a box, else of all, without `$`, commas and units; None: no number."""
    for written, plain in _LATEX.items():
        text = text.replace(written, plain)
    found = next((numbers for place in _PLACES if (numbers := place.findall(text))), [""])[-1]
    return Decimal(re.sub(r"[$,]", "", found)) if found else None


def program(reference: Reference, text: str) -> str:
    """Return the program that says whether HumanEval's task is done: the function as a text has it, and the tests.

    A text defines the function, in a fence or not, or it goes on where the prompt ends.
    """
    name, beginning = reference.entry_point, reference.prompt
    defined = re.compile(rf"^[ \t]*def {re.escape(name)}\(", re.MULTILINE)
    blocks = _FENCED.findall(text) or [_code_lines(text)]
    code = next(filter(defined.search, blocks), None)
    if code is None:
        code = "\n".join(takewhile(lambda line: not line[:1].strip(), blocks[0].splitlines()))
    else:  # of the prompt, imports and functions that it calls
        code, beginning = dedent(code), beginning[: max(beginning.rfind(f"def {name}("), 0)]
    return f"{beginning}{code}\n{reference.test}\ncheck({name})\n"


def _code_lines(text: str) -> str:
    """Return the first lines of a text that may be code, without prose around them."""
    lines = dropwhile(lambda line: not (line.strip() and _CODE.match(line)), text.splitlines())
    return "\n".join(takewhile(_CODE.match, lines))


def is_right(reference: Reference, text: str) -> bool:
    """Return whether an answer is the reference's, or its code passes the tests."""
    if reference.test:
        return sandbox.passes(program(reference, text))
    return final_number(text) == final_number(reference.answer)


def check_references(prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if no prompt has a right answer, or one of them no number."""
    references = [(prompt, prompt.reference) for prompt in prompts if prompt.reference]
    if not references:
        raise ConfigError("no prompt has a right answer: --accuracy is for GSM8K and HumanEval, also as published")
    for prompt, reference in references:
        if not reference.test and final_number(reference.answer) is None:
            raise ConfigError(f"{prompt.dataset}, {prompt.id}: the answer {reference.answer[:40]!r} has no number")


def count_right(
    turns: Sequence[Turn], decode: Callable[[Sequence[int]], str],
    judge: Callable[[Reference, str], bool] = is_right,
) -> Right:  # fmt: skip
    """Return how many answers are right, by data set and contestant; data sets without right answers are left out."""
    verdicts: dict[tuple[Reference, str], bool] = {}
    right: dict[str, dict[str, dict[int, int]]] = {}
    for turn, prompt, token_ids in _answers(turns):
        assert prompt.reference, "others are left out"
        key = (prompt.reference, decode(token_ids))
        if key not in verdicts:
            verdicts[key] = judge(*key)
        counts = right.setdefault(prompt.dataset, {}).setdefault(turn.contestant, {})
        counts[turn.repeat] = counts.get(turn.repeat, 0) + verdicts[key]
    return {dataset: {name: list(counts.values()) for name, counts in own.items()} for dataset, own in right.items()}


def _answers(turns: Sequence[Turn]) -> Iterator[tuple[Turn, Prompt, list[int]]]:
    for turn in turns:
        for prompt, completion in zip(turn.prompts, turn.completions, strict=True):
            if prompt.reference:
                yield turn, prompt, completion.token_ids


def add_right(contestants: dict[str, dict[str, Any]], right: Right, prompts: Sequence[Prompt]) -> None:
    """Add to the figures of each data set how many answers are right, of how many."""
    for dataset, own in right.items():
        asked = sum(prompt.dataset == dataset and prompt.reference is not None for prompt in prompts)
        for name, counts in own.items():
            contestants[name]["by_dataset"][dataset] |= {"right": counts, "asked": asked}
