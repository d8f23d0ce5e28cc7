"""Text in and out: identity of tokenizers, chat templates, incremental decoding, stop strings."""

import json
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specq.protocol.errors import ConfigError, JobError
from specq.testing.tokenizer import SPECIAL, tokenizer_files, tokenizer_json
from specq.text.codec import TextCodec, load_tokenizer_files, num_tokens, tokenizer_hash
from specq.text.detokenizer import Detokenizer, StopMatcher
from tests.each import each

CODEC = TextCodec(tokenizer_files())
NUM_TOKENS = num_tokens(tokenizer_json())
token_lists = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40)
texts = st.text(st.sampled_from("ab \né中🙂"), max_size=30)


def byte_ids(text: str) -> list[int]:
    """Return one token for each UTF-8 byte: the hardest boundaries that there are."""
    single = {CODEC.decode([i]): i for i in range(NUM_TOKENS)}
    alphabet = {ord(c): i for c, i in single.items() if len(c) == 1 and ord(c) < 128}
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    return [alphabet.get(b, vocab.get(_BYTE_CHARS[b])) for b in text.encode()]


def _byte_chars() -> dict[int, str]:
    """Return the character that byte-level vocabularies write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_BYTE_CHARS = _byte_chars()


# --- identity -----------------------------------------------------------------------------------------------------


def test_hash_ignores_formatting():
    """Indentation, key order and the older notation of merges do not change the hash."""
    content = json.loads(tokenizer_json())
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    assert tokenizer_hash(tokenizer_json()) == tokenizer_hash(json.dumps(content, indent=3, sort_keys=True))


@each("part", ["vocab", "merges", "added"])
def test_hash_sees_content(part):
    """A renamed token, a dropped merge and another special token each change the hash."""
    content = json.loads(tokenizer_json())
    if part == "vocab":
        content["model"]["vocab"]["zzz"] = content["model"]["vocab"].pop("a")
    elif part == "merges":
        content["model"]["merges"].pop()
    else:
        content["added_tokens"][0]["content"] = "<|other|>"
    assert tokenizer_hash(tokenizer_json()) != tokenizer_hash(json.dumps(content))


def test_num_tokens_counts_added_tokens():
    """The size is the largest id plus one, wherever the token is listed."""
    content = json.loads(tokenizer_json())
    before = num_tokens(tokenizer_json())
    content["added_tokens"].append({"id": before + 4, "content": "<far>", "special": False})
    assert num_tokens(json.dumps(content)) == before + 5


@each("text", ["", "[]", "{}", '{"model": {}}', "not json"])
def test_no_tokenizer_is_an_error(text):
    """A file that is not a tokenizer is a ConfigError that names the file."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer_hash(text)


def test_load_tokenizer_files(tmp_path):
    """Files that are there are read; without a tokenizer.json there is nothing to serve."""
    assert load_tokenizer_files(tmp_path) == {}
    for name, text in tokenizer_files().items():
        (tmp_path / name).write_text(text, "utf-8")
    assert load_tokenizer_files(tmp_path) == tokenizer_files()


# --- codec --------------------------------------------------------------------------------------------------------


def test_round_trip():
    """Encoding and decoding gives the text back."""
    text = "def f(x):\n    return 'naïve 🙂'\n"
    assert CODEC.decode(CODEC.encode(text)) == text


def test_special_tokens():
    """Special tokens are known by id, left out of the text, and found by name."""
    assert [i for i in range(NUM_TOKENS) if CODEC.tokens[i].is_special] == [0, 1, 2]
    assert CODEC.decode([1, *CODEC.encode("a"), 2]) == "a"
    assert CODEC.decode([2], skip_special=False) == SPECIAL[2]
    assert (CODEC.token_id("<|im_end|>"), CODEC.token_id("none such")) == (2, None)


def test_chat_template():
    """A conversation becomes the template's text, the answer opened, special tokens as single ids."""
    messages = [user("Hi")]
    assert CODEC.render_chat(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = CODEC.encode_chat(messages)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def with_template(template: object, **config: object) -> TextCodec:
    config |= {"chat_template": template, "bos_token": {"content": "<s>"}}
    return TextCodec({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)})


def test_template_environment():
    """Templates find what Hugging Face gives them: tojson without HTML escapes, loop controls, generation, tokens."""
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}"
    )
    rendered = with_template(template).render_chat([user("<é>")] * 2)
    assert rendered == '<s>{"role": "user", "content": "<é>"}%'


def test_named_templates(tmp_path):
    """With tools, `tool_use` goes before `default`; files go before tokenizer_config.json. As in transformers."""
    listed = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    files = {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"}
    cases = [  # the list, the files, what is used without tools and with them
        (listed, [], "d", "t"),
        (listed[1:], [], "d", "d"),
        (listed, ["chat_template.jinja"], "D", "D"),
        (listed, [*files], "D", "T"),
        ("d", [*files], "D", "T"),
        ("d", [], "d", "d"),
    ]
    messages = [user("")]
    for number, (told, names, plain, with_tools) in enumerate(cases):
        folder = tmp_path / str(number)
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": told}))
        for name in names:
            (folder / name).write_text(files[name])
        codec, theirs = TextCodec(load_tokenizer_files(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
        for tools, expected in ((None, plain), ([], with_tools), ([{}], with_tools)):
            assert codec.render_chat(messages, tools=tools) == expected, (number, tools)
            assert theirs.apply_chat_template(messages, tools=tools, tokenize=False) == expected, (number, tools)
    with pytest.raises(JobError, match="no chat template called 'default', only 'tool_use'; send a plain prompt"):
        with_template(listed[:1]).render_chat(messages)


def test_templates_see_the_special_tokens_that_transformers_names():
    template = "{{ bos_token }}{{ add_bos_token }}{{ image_token }}"
    assert with_template(template, add_bos_token=False, image_token="<i>").render_chat([user("")]) == "<s>"


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


PART = r'^messages\[0\]\.content\[0\] must be {"type": "text", "text": \.\.\.}'
NO_TEXT = r"^messages\[1\]\.content must be a text or a list of parts, not"


@each(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ("hi", "list"),
        ([{"role": "user"}], "content"),
        (["hi"], "object"),
        ([user(float("nan"))], "JSON"),
        ([user(nested(5000))], r"^messages must be JSON values: "),
        ([user("refuse")], "no thanks"),
        ([user("escape")], "refuses"),
        ([user([{"type": "text", "text": "b"}, {"type": "image_url"}])], r"\[1\] is of type 'image_url'; only text"),
        ([user([{"type": "text"}])], PART),
        ([user(["b"])], PART),
        ([user("a"), user({"text": "b"})], f"{NO_TEXT} {{'text': 'b'}}"),
        ([user("a"), user(5)], f"{NO_TEXT} 5"),
    ],
)
def test_bad_messages(messages, reason):
    """Messages that cannot be used, and templates that reach out of the sandbox, are a JobError."""
    codec = with_template(
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('no thanks') }}{% endif %}"
        "{{ messages.__class__.__mro__ if messages[0].content == 'escape' }}"
        "{{ ''.__class__.mro() if messages[0].content == 'escape' }}"
    )
    with pytest.raises(JobError, match=reason):
        codec.render_chat(messages)


def test_no_template():
    """Without a template a chat is refused, with what to do instead."""
    with pytest.raises(JobError, match="plain prompt"):
        TextCodec({"tokenizer.json": tokenizer_json()}).encode_chat([user("x")])


# --- detokenizer --------------------------------------------------------------------------------------------------


def pieces(codec: TextCodec, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


@settings(max_examples=300)
@given(token_lists)
def test_pieces_join_to_the_text(token_ids):
    """Any tokens at all, broken characters and special tokens included: the pieces are the text."""
    assert "".join(pieces(CODEC, token_ids)) == CODEC.decode(token_ids)


@settings(max_examples=200)
@given(texts)
def test_no_half_characters(text):
    """With one token a byte, each piece is whole characters, and comes with its last byte."""
    shown = pieces(CODEC, byte_ids(text))
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)
    assert shown[-1] == ""


def test_garbage_is_bounded():
    """An endless run of broken bytes is shown as it comes, not hoarded, and what follows is whole."""
    broken = byte_ids("中")[1]
    detokenizer = Detokenizer(CODEC)
    shown = [detokenizer.push(i) for i in [broken] * 100 + byte_ids("中!")]
    assert "".join(shown) == "\ufffd" * 100 + "中!"
    assert len("".join(shown[:50])) > 30


def test_sentencepiece_like_decoder():
    """Decoders that look at the start of the text (Llama 2: space markers, byte fallback) keep their spaces."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁": 2, "▁world": 3, "s": 4}
    vocab |= {f"<0x{b:02X}>": 5 + i for i, b in enumerate("中国".encode())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    codec = TextCodec({"tokenizer.json": tokenizer.to_str()})
    hello = [1, 3, 4, 2, 3, 5, 6, 7, 8, 9, 10, 3]
    assert pieces(codec, hello) == ["Hello", " world", "s", " ", " world", *[""] * 6, "中国 world", ""]


# --- stop strings -------------------------------------------------------------------------------------------------


def naive_stop(text: str, stop: list[str], num_free: int) -> tuple[str, int]:
    """Return the text before the stop string that is complete first, but not within `num_free` characters, of those the
    longest; and how many characters the text has with it."""
    for end in range(num_free + 1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], end
    return text, len(text) + 1


@settings(max_examples=800)
@given(
    text=st.text(st.sampled_from("ab中"), max_size=20),
    stop=st.lists(st.text(st.sampled_from("ab中"), min_size=1, max_size=4), max_size=3),
    by_bytes=st.booleans(),
    min_tokens=st.just(0) | st.integers(0, 15),
    size=st.integers(1, 7) | st.just(99),
)
def test_stop_against_naive(text, stop, by_bytes, min_tokens, size):
    """The text before the first stop string, whatever the boundaries of tokens and of what is pushed at a time: nothing
    of a stop string ever leaks, the token that completes it is told, and what follows is ignored.

    A stop string that is complete with the last of `min_tokens` ends nothing, also later; one that goes on beyond does.
    """
    token_ids = byte_ids(text) if by_bytes else CODEC.encode(text)
    lengths = list(accumulate(map(len, pieces(CODEC, token_ids)[:-1]), initial=0))
    expected, end = naive_stop(text, stop, lengths[min(min_tokens, len(token_ids))])
    matcher, shown, found = StopMatcher(CODEC, tuple(stop), min_tokens), "", None
    for start in range(0, len(token_ids), size):
        index = matcher.push(token_ids[start : start + size])
        found = found if index is None else start + index
        shown += matcher.take()
        assert expected.startswith(shown)
    assert shown + matcher.finish() == expected
    assert found == next((i for i, length in enumerate(lengths[1:]) if length >= end), None)
    assert matcher.matched == (expected != text)


def test_many_stop_strings_are_found_like_few():
    """One of thousands ends the text, wherever it stands in their order, and what shares its beginning does not."""
    many = [f"{number:04d}~" for number in range(5000)]
    for found in ("0000~", "2499~", "4999~"):
        text = f"249 4999 {found[:4]}! {found}3"
        matcher = StopMatcher(CODEC, tuple(many))
        assert matcher.push(byte_ids(text)) == len(text) - 2
        assert matcher.finish() == text[: -len(found) - 1]


def test_without_stop_everything_is_shown_at_once():
    """Without stop strings no text waits."""
    matcher = StopMatcher(CODEC)
    assert matcher.push(CODEC.encode("eggs a day")) is None
    assert matcher.take() == "eggs a day"
