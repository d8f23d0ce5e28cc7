"""The form of an upload (multipart/form-data), parsed as its bytes come; pure.

Rule: it holds at most the bytes that were fed last, and short texts of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from specq.gateway.errors import ApiError

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
FILE = "file"
MOST_TEXT = 64  # bytes of a field
MOST_NAME = 255  # characters of a file's name
MOST_PARTS = 16
EXPIRY_S = (3600, 2_592_000)  # least and most, as at OpenAI


@dataclass(slots=True)
class UploadForm:
    """An upload. `file_name` None: the file's part has not begun."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None
    is_whole: bool = False
    _data: bytearray = field(default_factory=bytearray)  # of the file, since the last `take`
    _text: bytearray = field(default_factory=bytearray)  # of the present field
    _name: str = ""  # of the present part
    _header: tuple[bytes, bytes] = (b"", b"")
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _num_parts: int = 0
    _parser: Any = None

    def begin(self, content_type: str) -> None:
        """Read the header; raise ApiError if it is not that of a form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            message = "Content-Type must be multipart/form-data, with a boundary; files are uploaded as a form"
            raise ApiError(message, 415, "Content-Type")
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        calls = {f"on_{name}": getattr(self, f"_{name}") for name in (*names, "headers_finished", "end")}
        try:
            self._parser = MultipartParser(options[b"boundary"], calls)  # type: ignore[arg-type]
        except FormParserError as error:
            raise ApiError(f"the boundary cannot be used: {error}", param="Content-Type") from None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; raise ApiError if the form is wrong."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(f"the form is not valid multipart/form-data: {error}", code="invalid_form") from None

    def take(self) -> bytes:
        """Return the bytes of the file that came since the last call."""
        data, self._data = bytes(self._data), bytearray()
        return data

    def num_taken(self) -> int:
        """Return the number of bytes that `take` would return."""
        return len(self._data)

    # --- the parser's calls -----------------------------------------------------------------------------------------

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MOST_PARTS:
            raise ApiError(f"the form has more than {MOST_PARTS} parts", code="invalid_form")
        self._headers, self._text = {}, bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], b"")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()], self._header = value, (b"", b"")

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or self._name not in (*FIELDS, FILE):
            message = f"the form has an unknown field {self._name[:64]!r}; known: {', '.join((*FIELDS, FILE))}"
            raise ApiError(message, code="unknown_parameter")
        if self._name in self.fields or (self._name == FILE and self.file_name is not None):
            raise ApiError(f"the form has {self._name} twice", param=self._name)
        if self._name == FILE:
            self.file_name = shown_name(options.get(b"filename", b""))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._data += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > MOST_TEXT:
            raise ApiError(f"{self._name} is longer than {MOST_TEXT} bytes", param=self._name)

    def _part_end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_whole = True

    # --- its values -------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Raise ApiError unless the form is whole and has a file."""
        if not self.is_whole:
            raise ApiError("the form breaks off: its closing boundary is missing", code="invalid_form")
        if self.file_name is None:
            raise ApiError("the form has no file", param=FILE, code="missing_parameter")
        self.check_purpose()

    def check_purpose(self) -> None:
        """Raise ApiError unless the purpose is one that specq has."""
        purpose = self.fields.get("purpose")
        if purpose is None:
            raise ApiError("the form has no purpose", param="purpose", code="missing_parameter")
        if purpose != "batch":
            raise ApiError(f"purpose is {purpose!r}; specq takes files for batches only: batch", param="purpose")

    def keep_s(self, default: int) -> int:
        """Return for how many seconds the file is kept: at most `default`."""
        anchor, seconds = (self.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return default
        number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() else 0
        return read_expiry({"anchor": anchor, "seconds": number}, "expires_after", default)


def read_expiry(values: Any, name: str, default: int) -> int:
    """Return the seconds of `expires_after`, at most `default`."""
    low, high = EXPIRY_S
    if values is None:
        return default
    if not isinstance(values, dict) or values.keys() != {"anchor", "seconds"} or values["anchor"] != "created_at":
        raise ApiError(f'{name} must be {{"anchor": "created_at", "seconds": N}}', param=name)
    if type(values["seconds"]) is not int or not low <= values["seconds"] <= high:
        raise ApiError(f"{name}.seconds must be a whole number from {low} to {high}", param=name)
    return min(int(values["seconds"]), default)


def shown_name(raw: bytes) -> str:
    """Return a file's name for display: without directories and control characters."""
    text = raw.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(one if one.isprintable() else "?" for one in text)[:MOST_NAME] or "upload.jsonl"
