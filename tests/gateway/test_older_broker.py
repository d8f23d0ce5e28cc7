"""A gateway in front of a broker that knows no grammars."""

from __future__ import annotations

from collections.abc import Sequence

import openai
import pytest

from specq.protocol import GetStatus, Message, Status, Submit
from specq.testing.fake_broker import FakeBroker, answer
from tests.gateway.serving import openai_client, running

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def before(message: Message) -> Sequence[Message]:
    """Answer as a broker of before grammars does."""
    if isinstance(message, GetStatus):
        return [Status(report={"capabilities": ["owners"], "models": ["fake"], "workers": []})]
    return answer(message)


def test_a_request_with_a_grammar_is_refused_by_its_field(own_cache: None) -> None:
    """The broker receives only the others, and is asked once."""
    with FakeBroker(before) as broker, running(broker.address) as gateway, openai_client(gateway) as api:
        assert api.chat.completions.create(**CHAT).choices[0].message.content
        before_grammars = broker.num_heard(GetStatus)
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="too old for a grammar of the kind json_object"
            ) as refused:
                list(api.chat.completions.create(**CHAT, response_format={"type": "json_object"}, stream=stream))
            assert (refused.value.param, refused.value.code) == ("response_format", "invalid")
        assert broker.num_heard(GetStatus) == before_grammars + 1
        assert [job.params.grammar for job in broker.wait_for(Submit)] == [""]
