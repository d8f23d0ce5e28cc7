"""What is refused at the edge, and what a request becomes."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from specq.client.parameters import read_job_options, read_parameters, seed_used
from specq.client.request import ServedModel, read_request
from specq.protocol import JobError, decode, encode
from specq.testing.fake_broker import CODEC, INFO
from specq.testing.tokenizer import tokenizer_json
from specq.text.codec import TextCodec
from specq.verification.noise import derived_seed
from tests.each import each

SERVED = ServedModel(INFO, CODEC)
CHAT = [{"role": "user", "content": "Hi"}]


@each(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'? known: "),
        ("dead_line", "did you mean 'deadline'? known: "),
        ("zzz", "known: "),
        (f"{'x' * 9999}", "known: "),
    ],
)
def test_an_unknown_parameter_is_named_with_the_nearest(name, hint):
    """Those that a job may have besides the sampling are among the known."""
    with pytest.raises(JobError) as refused:
        read_parameters({name: 3})
    assert str(refused.value).partition("; ")[2].startswith(hint)
    assert {"mode", "priority", "explain"} <= set(str(refused.value).partition("known: ")[2].split(", "))


def hashed(seed: int) -> int:
    """As docs/reference/jobs.md says it."""
    digest = hashlib.blake2b(b"seed %d" % seed, digest_size=8).digest()
    return sum(byte << 8 * place for place, byte in enumerate(digest)) // 2


def test_any_seed_of_64_bits_is_taken():
    """Those of [0, 2**63) as they are. The others meet neither one another, nor small seeds, nor those of completions,
    for patterns that people use."""
    near = [*range(3000), *(1 << bit for bit in range(63)), *((1 << bit) - 1 for bit in range(64))]
    others = [-1 - seed for seed in near] + [2**63 + seed for seed in near]
    others += [-(1 << bit) for bit in range(64)] + [2**64 - 1 - seed for seed in range(3000)]
    assert all(seed_used(seed) == seed for seed in near)
    others = sorted(set(others))
    used = {seed: seed_used(seed) for seed in others}
    assert used == {seed: hashed(seed) for seed in others}
    some = [*near[:200], *near[3000:], *(used[seed] for seed in others[::20])]
    derived = {derived_seed(seed, index) for seed in some for index in range(4)}
    assert len({*used.values()}) == len(others)
    assert not {*used.values()} & {*near, *derived}


def test_a_seed_of_any_sign_is_the_job_s_and_its_completions():
    """The one that is shown, with which the text can be had again, is the one that is used."""
    (alone,) = read_request({"prompt": "a", "seed": -1}, SERVED).submits
    both = read_request({"prompt": "a", "seed": -1, "n": 2}, SERVED).submits
    assert decode(encode(alone)).params.seed == hashed(-1)
    assert [one.params.seed for one in both] == [derived_seed(hashed(-1), index) for index in (0, 1)]
    assert read_request({"prompt": "a", "seed": hashed(-1)}, SERVED).submits[0].params == alone.params


@each("seed", [-(2**63) - 1, 2**64, 1.0, "1", True, [1]])
def test_a_seed_beyond_64_bits_is_refused(seed):
    with pytest.raises(JobError, match=r"seed is .*, but must be a whole number from -2\*\*63 to 2\*\*64 - 1"):
        read_parameters({"seed": seed})


@each("salt", ["", 3, "x" * 1001, "\ud800", ["a"], True])
def test_an_invalid_salt_is_refused(salt):
    with pytest.raises(JobError, match=r"cache_salt is .*, but must be text of 1 to 1000 characters"):
        read_job_options({"cache_salt": salt})


def test_a_salt_is_sent_with_the_job_and_changes_no_other_field():
    (plain,), (salted,) = (
        read_request({"prompt": "a", "job_key": "k", "seed": 1} | salt, SERVED).submits
        for salt in ({}, {"cache_salt": "pepper\n"})
    )
    assert decode(encode(salted)) == replace(plain, cache_salt="pepper\n")


@each(
    ("source", "reason"),
    [
        ({}, "exactly one"), ({"prompt": "a", "token_ids": [1]}, "prompt and token_ids"), ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "string"), ({"prompt": "\ud800"}, "Unicode"), ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "Unicode"), ({"messages": "hi"}, "list"),
        ({"token_ids": []}, "empty"), ({"token_ids": [1, True]}, "integers"), ({"token_ids": [1.0]}, "integers"),
        ({"token_ids": "12"}, "integers"), ({"token_ids": [3, INFO.num_tokens]}, f"{INFO.num_tokens} is outside"),
        ({"token_ids": [-1]}, "-1 is outside"), ({"token_ids": [2**40]}, "outside"),
        ({"token_ids": [3] * 100}, "100 tokens"),
    ],
)  # fmt: skip
def test_bad_prompts(source, reason):
    """Each unusable prompt is refused with what is wrong with it."""
    with pytest.raises(JobError, match=reason) as caught:
        read_request(source, SERVED)
    assert caught.value.code == "invalid"


@each(
    ("params", "reason"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "non-empty strings of at most 256 characters"),
        ({"stop": ["x" * 257]}, "non-empty strings of at most 256 characters"),
        ({"stop": [str(i) for i in range(65)]}, "at most 64 non-empty strings"),
        ({"strategy": "wishful"}, "deterministic"),
        ({"temprature": 1.0}, "temprature"),
        ({"n": 0}, "n is 0"),
        ({"n": 129}, "128"),
        ({"n": True}, "n is True"),
        ({"n": 2.0}, "n is 2.0"),
        ({"n": "3"}, "n is '3'"),
        ({"bad_words": 3}, "bad_words is 3"),
        ({"bad_words": ["a", " "]}, "more than spaces"),
        ({"bad_words": ["a", None]}, "list of texts"),
        ({"bad_words": ["\ud800"]}, "bad_words.*Unicode"),
        ({"stop": ["\ud800"]}, "stop.*Unicode"),
        ({"top_k": 2**31}, "top_k"),
        (
            {"stop_token_ids": [5, 2**70]},
            r"stop_token_ids is .*, but must be at most 16384 token ids from 0 to 2\*\*31 - 1",
        ),
        ({"logit_bias": {INFO.vocab_size: 1.0}}, "logit_bias names token id"),
        ({"logit_bias": [[5, 1.0], [5, 2.0]]}, "5 more than once"),
        ({"bad_token_ids": [[5], [5, INFO.vocab_size]]}, "bad_token_ids names token id"),
        ({"min_tokens": 100, "max_tokens": 120}, "min_tokens is 100"),
        ({"threshold": 0.2}, "threshold is given with strategy deterministic"),
        ({"threshold": 0.2, "strategy": "typical"}, "only strategy threshold"),
        ({"typical_eps": 0.09}, "only strategy typical"),
        ({"typical_delta": 0.3, "strategy": "greedy"}, "only strategy typical"),
        ({"mode": "fast"}, "async, sync, plain"),
        ({"mode": "plain", "num_candidates": 2}, "num_candidates is given with mode plain"),
        ({"mode": "plain", "tree": [[0]]}, "tree is given with mode plain"),
        ({"num_candidates": 65}, "num_candidates"),
        ({"tree": [[0], []]}, "tree"),
        ({"tree": [[0]], "num_candidates": 2}, "tree and num_candidates"),
        ({"candidate_temp": -0.5}, "candidate_temp"),
    ],
)
def test_bad_params(params, reason):
    """Each bad parameter is named, and so is what is allowed."""
    with pytest.raises(JobError, match=reason) as caught:
        read_request({"prompt": "a", **params}, SERVED)
    assert caught.value.code == "invalid"
    assert caught.value.field in params


def test_a_token_that_the_model_does_not_have_is_refused():
    """By each source, and as a bad word: a tokenizer may have more tokens than its model, or fewer."""
    limit = INFO.vocab_size - 1
    word = CODEC.decode([limit])
    for info, said in (
        (replace(INFO, vocab_size=limit), rf"the prompt has the token .* \(id {limit}\), which fake does not have"),
        (replace(INFO, num_tokens=limit), f"token id {limit} is outside the vocabulary of fake"),
    ):
        served = ServedModel(info, CODEC)
        for source in (
            {"prompt": word},
            {"messages": [{"role": "user", "content": word}]},
            {"token_ids": [limit]},
        ):
            with pytest.raises(JobError, match=said) as caught:
                read_request(source, served)
            assert (caught.value.field, caught.value.code) == (next(iter(source)), "invalid")
        assert read_request({"token_ids": [limit - 1]}, served).submits[0].prompt_ids.tolist() == [limit - 1]
    with pytest.raises(JobError, match="bad_words names token id") as caught:
        read_request({"token_ids": [1], "bad_words": [word]}, ServedModel(replace(INFO, vocab_size=limit), CODEC))
    assert caught.value.field == "bad_words"


def test_sources_become_ids():
    """Text is encoded, a chat goes through the template, ids are taken as they are."""
    text = read_request({"prompt": "two eggs"}, SERVED)
    chat = read_request({"messages": CHAT}, SERVED)
    raw = read_request({"token_ids": np.array([1, 40, 50])}, SERVED)
    assert (text.prompt, text.submits[0].prompt_ids.tolist()) == ("two eggs", CODEC.encode("two eggs"))
    assert (chat.prompt, chat.submits[0].prompt_ids.tolist()) == (CODEC.render_chat(CHAT), CODEC.encode_chat(CHAT))
    assert (raw.prompt, raw.submits[0].prompt_ids.tolist()) == (
        CODEC.decode([1, 40, 50], skip_special=False),
        [1, 40, 50],
    )


def test_max_tokens_is_cut_to_what_fits():
    """A prompt that leaves room for fewer tokens than asked for gets those; KV room counts too."""
    ids = {"token_ids": [5] * 90}
    assert read_request(ids | {"max_tokens": 50}, SERVED).submits[0].params.max_tokens == 10
    small = ServedModel(replace(INFO, kv_slots=95), CODEC)
    assert read_request(ids | {"max_tokens": 50}, small).submits[0].params.max_tokens == 5
    assert read_request({"token_ids": [5] * 99}, SERVED).submits[0].params.max_tokens == 1


def test_seed_is_drawn_only_where_needed():
    """Sampling without a seed draws one; greedy needs none; a given seed stays, 0 too."""
    drawn = {seed_of(temperature=1.0, seed=None) for _ in range(5)}
    assert len(drawn) == 5
    assert seed_of() == 0
    assert seed_of(temperature=1.0, seed=0) == 0


def seed_of(**values):
    (submit,) = read_request({"prompt": "a", **values}, SERVED).submits
    return submit.params.seed


def test_ids():
    """A job's id on the wire is random; the user's id is kept, else it is the job's."""
    first, second = (read_request({"prompt": "a"}, SERVED) for _ in range(2))
    assert first.submits[0].job_id != second.submits[0].job_id
    assert first.id == first.submits[0].job_id
    assert read_request({"prompt": "a", "id": "mine"}, SERVED).id == "mine"


def test_strategies_take_their_own_parameters():
    """And drafting parameters go where drafts are made."""
    typical = read_parameters({"strategy": "typical", "typical_eps": 0.2, "typical_delta": 0.4}).sampling
    assert (typical.typical_eps, typical.typical_delta) == (0.2, 0.4)
    assert read_parameters({"strategy": "threshold", "threshold": 0.5}).sampling.threshold == 0.5
    values = {"mode": "sync", "num_candidates": 4, "candidate_temp": 0.7, "candidate_top_p": 0.9, "max_depth": 5}
    (submit,) = read_request({"prompt": "a", **values}, SERVED).submits
    assert submit.speculation.to_dict() == values
    assert set(submit.params.to_dict()) <= {"max_tokens"}
    (submit,) = read_request({"prompt": "a", "tree": [[0], [0, 0], [1]], "max_nodes": 9}, SERVED).submits
    assert (submit.speculation.tree, submit.speculation.max_nodes) == (((0,), (0, 0), (1,)), 9)


def test_several_completions():
    """Jobs that differ in id and seed alone; the seeds are made of the seed, which is drawn if need be."""
    request = read_request({"prompt": "a", "n": 3, "seed": 5, "temperature": 0.8, "max_tokens": 7}, SERVED)
    first, *others = request.submits
    assert [submit.params.seed for submit in request.submits] == [derived_seed(5, index) for index in range(3)]
    assert len({submit.job_id for submit in request.submits}) == 3
    assert all(
        replace(o, job_id=first.job_id, params=replace(o.params, seed=first.params.seed)) == first for o in others
    )
    drawn = [read_request({"prompt": "a", "n": 2, "temperature": 0.8}, SERVED) for _ in range(2)]
    assert len({submit.params.seed for request in drawn for submit in request.submits}) == 4


def banned(*words: str) -> set[tuple[int, ...]]:
    (submit,) = read_request({"prompt": "a", "bad_words": list(words)}, SERVED).submits
    assert len(set(submit.params.bad_token_ids)) == len(submit.params.bad_token_ids)
    return set(submit.params.bad_token_ids)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(CODEC.encode_part(text))


def test_bad_words_are_banned_alone_and_after_a_space():
    """As the tokenizer spells them there, however many tokens that takes; spaces before a word do not matter."""
    assert len(spelled("eggs")) != len(spelled(" eggs"))
    assert banned("eggs") == banned("  eggs", "eggs") == {spelled("eggs"), spelled(" eggs")}
    assert banned("eggs", "two") == banned("eggs") | banned("two")


def test_a_spelling_that_contains_the_other_is_banned_once():
    """Where a space is a token of its own, the word's own tokens are enough."""
    assert spelled(" \n")[-1:] == spelled("\n")
    assert banned("\n") == {spelled("\n")}


def test_bad_words_join_bad_tokens():
    """Both are bans."""
    (submit,) = read_request({"prompt": "a", "bad_words": "eggs", "bad_token_ids": [[9, 8]]}, SERVED).submits
    assert set(submit.params.bad_token_ids) == {(9, 8)} | banned("eggs")


def test_bad_words_have_no_special_tokens():
    """Where the tokenizer begins a text with one, the ban holds in the middle all the same."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    marked = TextCodec({"tokenizer.json": tokenizer.to_str()})
    assert marked.encode("eggs") == [1, *spelled("eggs")]
    (submit,) = read_request({"prompt": "a", "bad_words": "eggs"}, ServedModel(INFO, marked)).submits
    assert set(submit.params.bad_token_ids) == banned("eggs")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, allow_nan=False, allow_infinity=False), "top_k": st.integers(0),
            "seed": st.integers(0), "stop": st.lists(st.text(st.characters(), min_size=1, max_size=256), max_size=64),
            "stop_token_ids": st.lists(st.integers(0)),
            "logit_bias": st.dictionaries(st.integers(0), st.floats(-100, 100)),
            "bad_words": st.lists(st.text(st.characters(), min_size=1)), "max_tokens": st.integers(1),
            "min_tokens": st.integers(0), "logprobs": st.integers(-1), "n": st.integers(1, 3),
            "max_depth": st.integers(0), "tree": st.lists(st.lists(st.integers(0))),
        },
    )
)  # fmt: skip
def test_what_is_accepted_can_be_sent(values):
    """For any values: they are refused with a reason, or each message of the request travels unchanged."""
    try:
        request = read_request({"prompt": "a", **values}, SERVED)
    except JobError:
        return
    for submit in request.submits:
        assert decode(encode(submit)) == submit


def test_trace_is_true_or_false():
    assert [read_job_options(given).trace for given in ({}, {"trace": True}, {"trace": False})] == [False, True, False]
    with pytest.raises(JobError, match="trace is 1, but must be true or false"):
        read_job_options({"trace": 1})
