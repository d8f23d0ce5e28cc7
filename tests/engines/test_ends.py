"""End tokens come from all files that name them, those of older versions first; what is new among them is said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from specq.engines import ends_told
from specq.engines.checkpoint import added_ends, describe, end_tokens, fingerprint, tensors_hash
from specq.protocol import ConfigError
from specq.testing.tokenizer import TEMPLATE, tokenizer_json

GENERATION: tuple[Any, ...] = (None, 0, [0], [1, 0], [])
CONFIG: tuple[Any, ...] = (None, 1, [2, 1])
TOKENIZER: tuple[Any, ...] = (None, "<|im_end|>", {"content": "<|im_end|>"}, "no such token")
SPECIAL: tuple[Any, ...] = (None, "<|im_start|>")


def write(place: Path, **said: dict[str, Any]) -> None:
    """Write a checkpoint whose files say this of its end."""
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_text(tokenizer_json())
    (place / "model.safetensors").write_bytes(b"tensors")
    for name in ("generation_config", "config", "tokenizer_config", "special_tokens_map"):
        given = {key: one for key, one in said.get(name, {}).items() if one is not None}
        (place / f"{name}.json").write_text(json.dumps(given))


def ids(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def test_the_ends_of_all_files_are_united(tmp_path: Path) -> None:
    """120 combinations: the union, what cb5a1ef took first and in its order, and all the others are said to be new."""
    for generation, config, token, special in itertools.product(GENERATION, CONFIG, TOKENIZER, SPECIAL):
        write(
            tmp_path,
            generation_config={"eos_token_id": generation},
            config={"eos_token_id": config},
            tokenizer_config={"eos_token": token},
            special_tokens_map={"eos_token": special},
        )
        by_tokenizer = ([2] if "im_end" in str(token) else []) + ([1] if special else [])
        before = ids(generation if generation is not None else config)
        found, case = end_tokens(tmp_path), (generation, config, token, special)
        assert (case, {*found}) == (case, {*ids(generation), *ids(config), *by_tokenizer})
        assert (case, list(found)[: len(before)]) == (case, before)
        assert (case, {*added_ends(tmp_path)}) == (case, {*found} - {*before})


@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_an_invalid_id_is_refused_with_its_file(tmp_path: Path, name: str) -> None:
    for value in (-1, 2**31, "2", True, 2.0, {}, [2, None], [[2]], [2, "x"]):
        write(tmp_path, **{name: {"eos_token_id": value}})
        with pytest.raises(ConfigError, match=rf"{name}\.json: eos_token_id is .*, but must be a token's id"):
            end_tokens(tmp_path)


def test_the_ends_are_those_of_transformers(tmp_path: Path) -> None:
    """The ids of its generation config and its tokenizer, by which vLLM ends a text."""
    write(
        tmp_path,
        generation_config={"eos_token_id": [0]},
        config={"model_type": "llama", "eos_token_id": 0},
        tokenizer_config={"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    generation, tokenizer = (kind.from_pretrained(tmp_path) for kind in (GenerationConfig, AutoTokenizer))
    assert {*end_tokens(tmp_path)} == {*generation.eos_token_id, tokenizer.eos_token_id} == {0, 2}


def test_the_doctor_receives_each_end_with_its_source(tmp_path: Path) -> None:
    """The end of a turn only where no file names an end."""
    told = {"tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}}
    write(tmp_path, generation_config={"eos_token_id": 0}, **told)
    assert ends_told(tmp_path) == ["<|endoftext|> 0 (generation_config.json)", "<|im_end|> 2 (tokenizer_config.json)"]
    write(tmp_path, config={"text_config": {"eos_token_id": 1}})
    assert ends_told(tmp_path) == ["<|im_start|> 1 (config.json)"]
    write(tmp_path, tokenizer_config={"chat_template": TEMPLATE})
    assert ends_told(tmp_path) == ["<|im_end|> 2 (the chat template; in chats only)"]
    write(tmp_path)
    assert ends_told(tmp_path) == []


@pytest.mark.parametrize(("token", "added"), [("<|endoftext|>", ()), ("<|im_end|>", (2,))])
def test_the_former_fingerprint_is_that_of_the_former_ends(tmp_path: Path, token: str, added: tuple[int, ...]) -> None:
    write(tmp_path, generation_config={"eos_token_id": 0})
    before = fingerprint(tmp_path)
    write(tmp_path, generation_config={"eos_token_id": 0}, tokenizer_config={"eos_token": token})
    info = describe(tmp_path, engine="e", name="", dtype="float32", vocab_size=352, max_length=99, kv_slots=1)
    assert (info.eos_ids, info.added_eos_ids) == ((0, *added), added)
    assert info.former_fingerprint == (before if added else tensors_hash(tmp_path))
    assert (info.fingerprint == before) == (not added)
