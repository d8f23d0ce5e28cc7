"""Chats of a model whose files name no end: the end of a turn is part of the job. Tokens that a model has no row for
are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from specq.broker.jobs.intake import misfit
from specq.client.request import ServedModel, read_request
from specq.protocol import JobError, SamplingParams
from specq.testing.fake_broker import CODEC, INFO
from specq.testing.tokenizer import TEMPLATE, tokenizer_files
from specq.text.codec import TextCodec

CHAT = [{"role": "user", "content": "Hi"}]
END, TURN, TURN_END = 0, 1, 2  # of SPECIAL in specq.testing.tokenizer
UNNAMED = replace(INFO, eos_ids=())
NAMED = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] | trim + "
TEMPLATES: dict[str, int | None] = {
    TEMPLATE: TURN_END,
    NAMED + "' \n<|endoftext|>' }}{% endfor %}": END,  # behind white space
    NAMED + "'\n' }}{% endfor %}": None,  # no token ends a turn
    NAMED + "'<|im_start|>' }}{{ ' bye' }}{% endfor %}": TURN,
    "{{ messages[0]['content'] }}": None,  # it leaves answers out
    "{{ raise_exception('only one turn') }}": None,
    "": None,
}


def codec_of(template: str) -> TextCodec:
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    return TextCodec({**tokenizer_files(), "tokenizer_config.json": json.dumps(settings)})


def stops(served: ServedModel, **arguments: Any) -> tuple[int, ...]:
    return read_request(arguments, served).submits[0].params.stop_token_ids


def test_the_end_of_a_turn_is_the_token_behind_an_answer() -> None:
    for template, expected in TEMPLATES.items():
        assert (template, codec_of(template).turn_end) == (template, expected)


def test_the_turn_end_stops_only_chats() -> None:
    """It stands in the job, so that journal and verifiers know it; a model whose files name an end has its own."""
    served = ServedModel(UNNAMED, CODEC)
    assert stops(served, messages=CHAT) == (TURN_END,)
    assert stops(served, messages=CHAT, stop_token_ids=[7]) == (7, TURN_END)
    assert stops(served, messages=CHAT, stop_token_ids=[TURN_END, 7]) == (TURN_END, 7)
    assert stops(served, messages=CHAT, ignore_eos=True) == ()
    assert stops(served, prompt="Hi") == stops(served, token_ids=[3]) == ()
    assert stops(ServedModel(INFO, CODEC), messages=CHAT) == ()


def test_a_token_that_the_model_has_no_row_for_is_named() -> None:
    """From text, chat and ids; the broker refuses what other clients send."""
    tokenizer = Tokenizer.from_str(tokenizer_files()["tokenizer.json"])
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False)])
    codec = TextCodec({**tokenizer_files(), "tokenizer.json": tokenizer.to_str()})
    info = replace(INFO, vocab_size=size, num_tokens=size + 1)
    served = ServedModel(info, codec)
    for arguments in (
        {"prompt": "a<extra>"},
        {"messages": [{"role": "user", "content": "a<extra>"}]},
        {"token_ids": [3, size]},
    ):
        with pytest.raises(
            JobError, match=rf"the token '<extra>' \(id {size}\), which {info.name} does not have: .* {size + 1} tokens"
        ):
            read_request(arguments, served)
    (submit,) = read_request({"prompt": "a"}, served).submits
    assert misfit(replace(submit, params=SamplingParams(max_tokens=4)), info) == ""
    sent = replace(submit, params=SamplingParams(max_tokens=4), prompt_ids=submit.prompt_ids * 0 + size)
    assert misfit(sent, info) == f"the prompt has token ids outside the vocabulary of {info.name} (0 to {size - 1})"
