"""The lines of input files: splitting, checks of each, and of all together."""

from __future__ import annotations

from itertools import pairwise

import orjson
from hypothesis import given
from hypothesis import strategies as st

from specq.batches.lines import (
    MOST_LINES,
    MOST_REASONS,
    BatchLine,
    FileCheck,
    LineReason,
    LineSplitter,
    RawLine,
    read_line,
)
from tests.each import each

URL = "/v1/completions"


def line(number=1, **changes) -> bytes:
    values = {"custom_id": f"a{number}", "method": "POST", "url": URL, "body": {"prompt": "a"}} | changes
    return orjson.dumps({name: value for name, value in values.items() if value is not None})


def split(chunks, most=1000) -> list[RawLine]:
    splitter = LineSplitter(most)
    return [raw for chunk in chunks for raw in splitter.feed(chunk)] + list(splitter.end())


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_lines_do_not_depend_on_chunks(data, cuts):
    """They are those of the whole file, with their numbers."""
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[start:end] for start, end in pairwise(places)]
    whole = [(number, part) for number, part in enumerate(data.split(b"\n"), 1) if part.strip()]

    assert [tuple(raw) for raw in split(chunks)] == whole


@given(st.integers(1, 40), st.integers(1, 30))
def test_a_long_line_is_not_kept(size, step):
    data = b"x" * size + b"\nok\n"
    chunks = [data[start : start + step] for start in range(0, len(data), step)]
    expected = RawLine(1, b"x" * size if size <= 20 else None)

    assert split(chunks, most=20) == [expected, RawLine(2, b"ok")]


def test_a_splitter_holds_little_of_a_long_line():
    splitter = LineSplitter(100)
    for _ in range(1000):
        list(splitter.feed(b"x" * 99))
        assert len(splitter._rest) <= 100


def test_a_valid_line():
    data = line(body={"prompt": "é"})

    assert read_line(RawLine(7, data), URL) == BatchLine(7, "a1", {"prompt": "é"}, len(data))
    assert isinstance(read_line(RawLine(1, b"\xef\xbb\xbf" + data), URL), BatchLine)


@each(
    ("data", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b'"a"', "invalid_json_line", None),
        (b"null", "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (b"\x00", "invalid_json_line", None),
        (b"\xef\xbb\xbf" + line(), "invalid_json_line", None),  # a mark that is not at the file's begin
        (b"[" * 200 + b"]" * 200, "invalid_json_line", None),
        (None, "line_too_large", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(more=1), "unknown_parameter", "more"),
        (line(custom_id=3), "invalid_custom_id", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "invalid_url", "url"),
        (line(url=f"http://other{URL}"), "invalid_url", "url"),
        (line(body=[1]), "invalid_body", "body"),
    ],
)
def test_a_wrong_line_is_named(data, code, param):
    reason = read_line(RawLine(3, data), URL)

    assert isinstance(reason, LineReason)
    assert (reason.code, reason.line, reason.param) == (code, 3, param)
    assert "3" in reason.message


def checked(lines) -> FileCheck:
    check = FileCheck(URL)
    for number, data in enumerate(lines, 1):
        if not check.is_over:
            check.take(RawLine(number, data))
    return check


def test_a_valid_file():
    check = checked([line(number) for number in range(1, 4)])

    assert (check.total, check.result()) == (3, [])


def test_the_same_id_again():
    (reason,) = checked([line(1), line(2), line(1)]).result()

    assert (reason.code, reason.line) == ("duplicate_custom_id", 3)


def test_an_empty_file():
    assert [reason.code for reason in checked([]).result()] == ["empty_file"]


def test_too_many_lines():
    check = FileCheck(URL)
    check.total = MOST_LINES - 1
    check.take(RawLine(MOST_LINES, line(1)))
    assert not check.is_over
    check.take(RawLine(MOST_LINES + 1, line(2)))

    assert check.is_over
    assert [reason.code for reason in check.result()] == ["too_many_lines"]


def test_reasons_are_bounded():
    check = checked([b"{"] * (MOST_REASONS + 50))

    assert check.is_over
    assert len(check.result()) == MOST_REASONS
