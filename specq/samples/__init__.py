"""Benchmark prompts: samples that ship with specq, a JSONL file, or GSM8K or HumanEval.

A line of a JSONL file is `{"prompt": ...}` or `{"messages": [...]}`. GSM8K and HumanEval are read as published, with
their reference answers.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson

from specq.client import PromptLine, read_lines
from specq.models import resolve_model
from specq.protocol import ConfigError, JobError
from specq.text import TextCodec, load_tokenizer_files

DATA = Path(__file__).parent / "data"
_PUBLISHED = {"question": "prompt", "task_id": "id"}  # keys of GSM8K and HumanEval -> ours


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answer.

    - answer: GSM8K, a text whose last number is the answer.
    - prompt, test, entry_point: HumanEval, the beginning of the program, a function `check`, and the name of the
      function that it tests.
    """

    answer: str = ""
    prompt: str = ""
    test: str = ""
    entry_point: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as all contestants receive it: token ids, with the chat template applied.

    `reference`: the line's reference answer, if it has one.
    """

    dataset: str
    id: str
    token_ids: tuple[int, ...]
    reference: Reference | None = None


def shipped() -> list[str]:
    """Return the names of the data sets in the package."""
    return sorted(path.stem for path in DATA.glob("*.jsonl"))


def shipped_and_chats() -> tuple[str, ...]:
    """Return the result of `shipped`, and the files of chats in the package."""
    return (*shipped(), *files_of(DATA / "chat"))


def files_of(directory: Path) -> tuple[str, ...]:
    """Return the JSONL files of a directory, each a data set. Raises ConfigError if there is none."""
    files = tuple(sorted(map(str, directory.glob("*.jsonl"))))
    if not files:
        raise ConfigError(f"{directory} has no file that ends in .jsonl")
    return files


def load_prompts(datasets: tuple[str, ...], num_each: int, codec: TextCodec) -> list[Prompt]:
    """Return the first prompts of each data set (a name or a file). Raises ConfigError for an unreadable one."""
    return [prompt for dataset in datasets for prompt in _load(dataset, num_each, codec)]


def shipped_token_ids(num_each: int, model: str = "tiny") -> list[list[int]]:
    """Return the first prompts of each shipped data set as token ids of a model."""
    return [list(prompt.token_ids) for prompt in load_prompts(tuple(shipped()), num_each, codec_of(model))]


def shipped_messages(num_each: int) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the first prompts of each shipped data set, each as a name and a chat."""
    found = []
    for name in shipped():
        with (DATA / f"{name}.jsonl").open("rb") as file:
            lines = islice(read_lines(file), num_each)
            found += [
                (f"{name}/{one.number}", [{"role": "user", "content": str(one.arguments["prompt"])}]) for one in lines
            ]
    return found


def codec_of(model: str) -> TextCodec:
    """Return the tokenizer of a target. Raises ConfigError if it is not on this machine."""
    path = Path(resolve_model(model, "target"))
    if not path.exists():
        raise ConfigError(f"{model} is not on this machine; a benchmark needs its tokenizer")
    return TextCodec(load_tokenizer_files(path))


def _load(dataset: str, num: int, codec: TextCodec) -> list[Prompt]:
    path = DATA / f"{dataset}.jsonl" if dataset in shipped() else Path(dataset)
    references = dict[int, Reference]()  # by line number
    try:
        with path.open("rb") as file:
            lines = list(islice(read_lines(_without_references(file, references)), num))
    except OSError as error:
        raise ConfigError(
            f"unknown data set {dataset!r} ({error.strerror}); available: {', '.join(shipped())}, or name a JSONL file"
        ) from None
    return [_prompt(path.stem, line, codec, references.get(line.number)) for line in lines]


def _without_references(raw_lines: Iterable[bytes], found: dict[int, Reference]) -> Iterator[bytes]:
    """Yield the lines in the form of a prompts file. Their reference answers go to `found`."""
    for number, raw in enumerate(raw_lines, 1):
        try:
            values = orjson.loads(raw.removeprefix(BOM_UTF8))
        except orjson.JSONDecodeError:
            values = None  # `read_lines` reports the error
        if not isinstance(values, dict) or not ("answer" in values or {"test", "entry_point"} <= values.keys()):
            yield raw
            continue
        line = {_PUBLISHED.get(name, name): value for name, value in values.items() if name != "canonical_solution"}
        given = {name: str(line.pop(name)) for name in ("answer", "test", "entry_point") if name in line}
        found[number] = Reference(**given, prompt=str(line.get("prompt", "")))
        yield orjson.dumps(line)


def _prompt(dataset: str, line: PromptLine, codec: TextCodec, reference: Reference | None) -> Prompt:
    if line.error:
        raise ConfigError(f"{dataset}: {line.error}")
    arguments = line.arguments
    try:
        token_ids = arguments.get("token_ids") or _encode(arguments, codec)
    except JobError as error:
        raise ConfigError(f"{dataset}, line {line.number}: {error}") from None
    return Prompt(dataset, str(line.id), tuple(token_ids), reference)


def _encode(arguments: dict[str, object], codec: TextCodec) -> list[int]:
    """Encode as a chat, or as plain text if the model has no chat template."""
    messages = arguments.get("messages") or [{"role": "user", "content": arguments.get("prompt")}]
    if codec.has_chat_template:
        return codec.encode_chat(messages, **arguments.get("chat_template_kwargs") or {})  # type: ignore[arg-type]
    return codec.encode(str(arguments.get("prompt")))
