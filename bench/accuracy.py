"""Whether the answers are right: GSM8K's number is read from the text; HumanEval's function is run with its tests.

Rule: a text is judged once, for all contestants. So contestants with the same text have the same share of right
answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from itertools import dropwhile, takewhile
from statistics import mean
from textwrap import dedent

from bench import generated_code
from bench.turns import Turn
from specq.protocol import ConfigError
from specq.samples import Prompt, Reference

_NUMBER = r"((?:(?<![\w)\]}])-)?(?:\$-?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+))"
_PLACES = tuple(re.compile(mark + _NUMBER) for mark in (r"####[\s*:=]*", r"\\boxed\{[^}]*?", ""))  # of the answer
_LATEX = {"{,}": ",", "\\,": "", "\\!": "", "\\$": "$", "\N{MINUS SIGN}": "-"}
_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"\s|$|(?:def|class|import|from)\s|[@#]")  # begins a line of code outside of a fence

Decode = Callable[[Sequence[int]], str]
Judge = Callable[[Reference, str], bool]
Shares = dict[str, dict[str, list[float]]]  # data set -> contestant -> share of each repetition


def final_number(text: str) -> Decimal | None:
    """Return the last number after `####`, else in a box, else in the text, without `$`, commas and units.

    None if there is no number.
    """
    for written, plain in _LATEX.items():
        text = text.replace(written, plain)
    found = next((numbers for place in _PLACES if (numbers := place.findall(text))), [""])[-1]
    return Decimal(re.sub(r"[$,]", "", found)) if found else None


def program(reference: Reference, text: str) -> str:
    """Return the program that tests HumanEval's task: the function from a text, and the tests.

    A text defines the function, in a fence or not, or it continues the prompt.
    """
    name, beginning = reference.entry_point, reference.prompt
    defined = re.compile(rf"^[ \t]*def {re.escape(name)}\(", re.MULTILINE)
    bare = _code_lines(text)
    code = next(filter(defined.search, [*_FENCED.findall(text), bare]), None)
    if code is None:
        code = "\n".join(takewhile(lambda line: not line[:1].strip(), bare.splitlines()))
    else:  # from the prompt: imports and functions that it calls
        code, beginning = dedent(code), beginning[: max(beginning.rfind(f"def {name}("), 0)]
    return f"{beginning}{code}\n{reference.test}\ncheck({name})\n"


def _code_lines(text: str) -> str:
    """Return the first lines of a text that may be code, without prose around them."""
    lines = dropwhile(lambda line: not (line.strip() and _CODE.match(line)), text.splitlines())
    return "\n".join(takewhile(_CODE.match, lines))


def is_right(reference: Reference, text: str) -> bool:
    """Return whether an answer is the reference's, or its code passes the tests."""
    if reference.test:
        return generated_code.passes(program(reference, text))
    wanted = final_number(reference.answer)
    return wanted is not None and final_number(text) == wanted


def check_references(prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if no prompt has a right answer."""
    if not any(prompt.reference for prompt in prompts):
        raise ConfigError("no prompt has a right answer: --accuracy is for GSM8K and HumanEval, also as published")


def share_right(turns: Sequence[Turn], decode: Decode, judge: Judge = is_right) -> Shares:
    """Return the share of right answers; data sets without right answers are left out."""
    judged = cache(judge)
    found: dict[str, dict[str, dict[int, list[bool]]]] = {}
    for turn in turns:
        for prompt, completion in zip(turn.prompts, turn.completions, strict=True):
            if prompt.reference:
                repeats = found.setdefault(prompt.dataset, {}).setdefault(turn.contestant, {})
                verdict = judged(prompt.reference, decode(completion.token_ids))
                repeats.setdefault(turn.repeat, []).append(verdict)
    return {
        dataset: {name: [mean(own) for own in repeats.values()] for name, repeats in everybody.items()}
        for dataset, everybody in found.items()
    }
