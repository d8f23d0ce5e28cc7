"""OpenAI's own client, unchanged, through every endpoint: sync and async, in one and as a stream."""

import asyncio

import openai
import pytest

from specq.client.parameters import seed_used
from specq.protocol import Submit
from specq.testing.fake_broker import ANSWER, ANSWER_IDS
from tests.each import each
from tests.gateway.serving import connected, running

CHAT = [{"role": "user", "content": "Hi"}]


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_models(api):
    (model,) = api.models.list().data

    assert (model.id, model.owned_by) == ("fake", "specq")
    assert api.models.retrieve("fake").id == "fake"


def test_a_chat(api):
    answer = api.chat.completions.create(model="fake", messages=CHAT)

    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert answer.model == "fake"
    assert answer.usage.completion_tokens == len(ANSWER_IDS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ANSWER_IDS)
    assert answer.usage.speculation["accepted_tokens"] == 6
    assert answer.usage.speculation["acceptance_rate"] == 0.75


def test_a_chat_as_a_stream(api):
    """The role first, then text, then the reason; the numbers only where they are asked for."""
    options = {"model": "fake", "messages": CHAT, "stream": True}
    chunks = list(api.chat.completions.create(**options))
    counted = list(api.chat.completions.create(**options, stream_options={"include_usage": True}))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert counted[-1].choices == []
    assert counted[-1].usage.completion_tokens == len(ANSWER_IDS)
    assert counted[-1].usage.speculation["rounds"] == 4


def test_a_stream_that_counts_in_each_chunk(api):
    """guidellm asks for it by default. Without the final numbers the chunks have no counts, as in vLLM."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for create, own in ((api.chat.completions.create, {"messages": CHAT}), (api.completions.create, {"prompt": "Hi"})):
        chunks = list(create(model="fake", **own, max_tokens=50, stream=True, stream_options=options))
        without = list(create(model="fake", **own, stream=True, stream_options=options | {"include_usage": False}))
        counts = [chunk.usage.completion_tokens for chunk in chunks]

        assert counts == sorted(counts)
        assert counts[-2:] == [len(ANSWER_IDS)] * 2
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
        assert all(
            chunk.usage.total_tokens == chunk.usage.prompt_tokens + n for chunk, n in zip(chunks, counts, strict=True)
        )
        assert [chunk.usage for chunk in without] == [None] * len(without)


def test_several_choices_as_a_stream(api):
    chunks = list(api.chat.completions.create(model="fake", messages=CHAT, n=3, stream=True))
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert texts == dict.fromkeys(range(3), ANSWER)


def test_completions(api, broker):
    """Several prompts, each with several completions, numbered in order; 16 tokens unless it is said."""
    answer = api.completions.create(model="fake", prompt=["a", "b"], n=2, seed=7)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(ANSWER.startswith(choice.text) and choice.finish_reason == "length" for choice in answer.choices)
    assert answer.usage.completion_tokens == 64
    assert {submit.params.max_tokens for submit in broker.wait_for(Submit, 4)} == {16}


@each("prompt", ["a b", ["a b"], [5, 6, 7], [[5, 6, 7]]])
def test_every_form_of_a_prompt(api, prompt):
    answer = api.completions.create(model="fake", prompt=prompt, max_tokens=90)
    chunks = list(api.completions.create(model="fake", prompt=prompt, max_tokens=90, stream=True))

    assert answer.choices[0].text == ANSWER
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_parameters_reach_the_job(api, broker):
    """OpenAI's own, vLLM's and specq's, the last two by extra_body."""
    own = {"mode": "sync", "num_candidates": 2, "strategy": "threshold", "threshold": 0.2}
    asked = FULL | {"n": 1, "extra_body": {"top_k": 4, "min_p": 0.1} | own, "stream_options": None}
    api.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=33, max_tokens=44, **asked)
    (submit,) = broker.wait_for(Submit)
    params = submit.params

    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 3)
    assert (params.stop, params.max_tokens) == (("END",), 33)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.1, 0.2, ((5, 1.5),))
    assert (params.top_k, params.min_p, params.strategy, params.threshold) == (4, 0.1, "threshold", 0.2)
    assert (submit.speculation.mode, submit.speculation.num_candidates) == ("sync", 2)


def test_without_a_limit_a_chat_may_fill_the_model(api, broker):
    api.chat.completions.create(model="fake", messages=CHAT)
    (submit,) = broker.wait_for(Submit)

    assert submit.params.max_tokens == 100 - len(submit.prompt_ids)
    assert submit.params.temperature == 1.0


def test_errors_are_of_openais_kinds(api):
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        api.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="temperature is 1000") as raised:
        api.chat.completions.create(model="fake", messages=CHAT, temperature=1000)
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        api.chat.completions.create(model="fake", messages=CHAT, response_format={"type": "xml"})
    for name in ("tools", "functions", "nonsense"):
        more = {"model": "fake", "extra_body": {name: [{"type": "custom", "name": "f"}]}}
        for create, prompt in (
            (api.chat.completions.create, {"messages": CHAT}),
            (api.completions.create, {"prompt": "a"}),
            (api.responses.create, {"input": "a"}),
        ):
            with pytest.raises(openai.BadRequestError, match=name) as raised:
                create(**prompt, **more)
            assert raised.value.param == name


def test_a_salt_and_any_seed_at_every_endpoint(api, broker):
    """What is cached comes with the numbers, in vLLM's form and OpenAI's."""
    own = {"model": "fake", "extra_body": {"cache_salt": "pepper", "seed": 2**64 - 1}}
    chat = api.chat.completions.create(messages=CHAT, **own)
    plain = api.completions.create(prompt="Hi", **own)
    response = api.responses.create(input="Hi", **own)
    submits = broker.wait_for(Submit, 3)

    assert {(submit.cache_salt, submit.params.seed) for submit in submits} == {("pepper", seed_used(2**64 - 1))}
    assert [one.usage.prompt_tokens_details.cached_tokens for one in (chat, plain)] == [2, 2]
    assert response.usage.input_tokens_details.cached_tokens == 2
    for salt in ("", 3, "x" * 1001):
        with pytest.raises(openai.BadRequestError, match=r"cache_salt is .* must be text of 1 to 1000"):
            api.completions.create(model="fake", prompt="Hi", extra_body={"cache_salt": salt})


def test_responses(api, broker):
    """In one, as a stream, and through the client's own reader of streams."""
    answer = api.responses.create(model="fake", input="Hi", instructions="Be brief.", max_output_tokens=50)
    events = list(api.responses.create(model="fake", input="Hi", stream=True))
    with api.responses.stream(model="fake", input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert (answer.output_text, answer.status, answer.store) == (ANSWER, "completed", False)
    assert (answer.id[:5], answer.output[0].id[:4]) == ("resp_", "msg_")
    assert (answer.usage.output_tokens, answer.instructions) == (len(ANSWER_IDS), "Be brief.")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(texts) == final.output_text == events[-1].response.output_text == ANSWER
    assert {submit.params.max_tokens for submit in broker.wait_for(Submit, 3)} > {50}


def test_a_top_p_of_0_is_greedy_at_each_endpoint(api, broker):
    """Beside the temperature of 1 that these endpoints have by default; an answer repeats what was asked."""
    api.completions.create(model="fake", prompt="Hi", top_p=0)
    api.chat.completions.create(model="fake", messages=CHAT, top_p=0)
    answer = api.responses.create(model="fake", input="Hi", top_p=0)

    assert (answer.temperature, answer.top_p) == (1, 0)
    assert {(submit.params.temperature, submit.params.top_p) for submit in broker.wait_for(Submit, 3)} == {(0, 1)}


def test_a_response_that_is_cut(api):
    answer = api.responses.create(model="fake", input="Hi", max_output_tokens=3)

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        api.responses.create(model="fake", input="Hi", previous_response_id="x")


def test_in_asyncio(gateway):
    """Many at once, in one and as streams."""

    async def scenario():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api:

            async def streamed():
                return [c async for c in await api.chat.completions.create(model="fake", messages=CHAT, stream=True)]

            models = [model.id async for model in api.models.list()]
            wholes = [api.completions.create(model="fake", prompt="a", max_tokens=n) for n in range(1, 20)]
            return models, await asyncio.gather(*wholes), await asyncio.gather(*(streamed() for _ in range(20)))

    models, wholes, streams = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert models == ["fake"]
    assert [answer.usage.completion_tokens for answer in wholes] == list(range(1, 20))
    assert [text_of(chunks) for chunks in streams] == [ANSWER] * 20


FULL = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["END"], "presence_penalty": 0.1,
    "frequency_penalty": 0.2, "logit_bias": {"5": 1.5},
    "stream_options": {"include_usage": True, "include_obfuscation": False}, "user": "someone",
    "extra_body": {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": False, "mode": "plain"},
}  # fmt: skip
NO_EFFECT = {
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}


def test_everything_at_once_sync_and_async(gateway, api):
    """Each endpoint with all that it honours, as a stream with the numbers at the end; both clients read the same."""
    chat = {"model": "fake", "messages": CHAT, "max_completion_tokens": 50, "stream": True, **FULL, **NO_EFFECT}
    plain = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 50, "stream": True, **FULL}

    async def same():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as other:
            return (
                [one async for one in await other.chat.completions.create(**chat)],
                [one async for one in await other.completions.create(**plain)],
                [one async for one in await other.responses.create(model="fake", input="Hi", stream=True)],
                (await other.responses.create(model="fake", input="Hi")).output_text,
            )

    chats, plains, responses, text = asyncio.run(asyncio.wait_for(same(), 30))
    for chunks, num_choices in ((chats, 2), (plains, 4), (list(api.chat.completions.create(**chat)), 2)):
        ends = [chunk.choices[0].index for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert (sorted(ends), chunks[-1].choices) == (list(range(num_choices)), [])
        assert chunks[-1].usage.completion_tokens == num_choices * len(ANSWER_IDS)
    assert all(
        text_of(c for c in chats if c.choices and c.choices[0].index == i) == ANSWER.partition("END")[0]
        for i in range(2)
    )
    assert (text, responses[-1].type) == (ANSWER, "response.completed")


# --- what OpenAI does not have ----------------------------------------------------------------------------------------


def test_tokens_and_text(http):
    tokens = http.post("/tokenize", json={"prompt": "duck eggs", "return_token_strs": True}).json()
    chat = http.post("/tokenize", json={"model": "fake", "messages": CHAT}).json()
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()

    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 100
    assert "".join(tokens["token_strs"]) == "duckĠeggs"  # as the vocabulary spells them
    assert text["prompt"] == "duck eggs"
    chat_text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert chat_text.endswith("<|im_start|>assistant\n")


def test_state(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]


@each(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_what_is_not_there(http, method, path, status):
    response = http.request(method, path)

    assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})


@each(
    ("path", "what"), [("/v1/embeddings", "embeddings"), ("/v1/images/generations", "images"), ("/v1/imagesque", None)]
)
def test_what_openai_has_and_specq_has_not_is_named(http, path, what):
    response = http.post(path, json={"input": "a"})

    expected = f"specq has no {what}: POST {path}" if what else f"Not Found: POST {path}"
    assert (response.status_code, response.json()["error"]["message"]) == (404, expected)


def test_metrics(broker, own_cache):
    """Requests by path and status; the pipeline behind is in test_metrics.py."""
    with running(broker.address) as gateway, connected(gateway) as http:
        http.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 5})
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "stream": True})
        http.post("/v1/completions", json={})
        http.get("/secret/path")
        shown = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in shown.splitlines() if not line.startswith("#"))

    assert lines['specq_http_requests_total{path="/v1/completions",status="200"}'] == "2.0"
    assert lines['specq_http_requests_total{path="/v1/completions",status="400"}'] == "1.0"
    assert lines['specq_http_requests_total{path="other",status="404"}'] == "1.0"
    assert lines["specq_http_first_token_seconds_count"] == "1.0"
    assert lines["specq_http_requests_under_way"] == "1.0"
