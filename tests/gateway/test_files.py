"""`/v1/files`: OpenAI's own client, quotas, keys, and forms that are wrong on purpose."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from itertools import pairwise

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.batches import CHUNK_BYTES
from specq.gateway import make_key
from specq.gateway.uploads import UploadForm
from specq.testing import wait_until
from tests.each import each
from tests.gateway.serving import connected, openai_client, raw, running

DATA = b'{"custom_id": "a"}\n'


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "b.batches"
    return {"batches": str(path), "upload_mb": 1, "batch_store_mb": 3, "body_seconds": 0.5}


@pytest.fixture(scope="module")
def gateway(_broker, options):
    with running(_broker.address, **options) as one:
        yield one


@pytest.fixture
def api(gateway):
    """A client of a gateway that has no files."""
    with openai_client(gateway) as client:
        for file in list(client.files.list()):
            client.files.delete(file.id)
        yield client


@pytest.fixture
def http(gateway, api):
    with connected(gateway) as client:
        yield client


def left(options) -> tuple[int, int]:
    """Return the numbers of files and chunks in the store."""
    try:
        with closing(sqlite3.connect(f"file:{options['batches']}?mode=ro", uri=True)) as connection:
            queries = (f"SELECT count(*) FROM {name}" for name in ("files", "chunks"))
            return tuple(connection.execute(query).fetchone()[0] for query in queries)
    except sqlite3.OperationalError:  # it is not there yet
        return 0, 0


def test_the_official_client(api):
    file = api.files.create(file=("in.jsonl", DATA), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(DATA), "in.jsonl", "batch", "file")
    assert file.expires_at - file.created_at == 30 * 86_400
    assert api.files.wait_for_processing(file.id).status == "processed"
    assert api.files.content(file.id).read() == DATA
    assert [one.id for one in api.files.list()] == [file.id]
    assert api.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file.id)
    assert list(api.files.list()) == []


def test_lists_in_pages(api):
    ids = [api.files.create(file=(f"{number}", DATA), purpose="batch").id for number in range(3)]
    assert [one.id for one in api.files.list(limit=2)] == ids[::-1]  # the client fetches the second page
    assert [one.id for one in api.files.list(order="asc", after=ids[0])] == ids[1:]
    assert list(api.files.list(purpose="batch_output")) == []


def test_expiry(api):
    expires = {"anchor": "created_at", "seconds": 3600}
    file = api.files.create(file=("a", DATA), purpose="batch", expires_after=expires)
    assert file.expires_at - file.created_at == 3600


def test_a_large_file_in_chunks(api, options):
    data = bytes(range(256)) * 4000
    file = api.files.create(file=("a", data), purpose="batch")
    assert file.bytes == len(data)
    assert api.files.content(file.id).read() == data
    assert left(options)[1] == pytest.approx(len(data) / CHUNK_BYTES, abs=1)


@each(
    ("size", "status", "code"),
    [((1 << 20) + 1, 413, "file_too_large"), (3 << 20, 413, None)],
)
def test_a_file_that_is_too_large(http, options, size, status, code):
    """By its bytes, or before by its length. Nothing of it stays."""
    response = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", bytes(size))})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    if code:
        assert left(options) == (0, 0)


def test_all_files_together(http):
    """A quarter of the store is left for results."""
    sizes = [900_000] * 3
    statuses = [
        http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", bytes(size))}).status_code
        for size in sizes
    ]
    assert statuses == [200, 200, 429]


def form(*parts: bytes, boundary: bytes = b"XX", end: bytes = b"--XX--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + end


PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'


@given(
    st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--XX", b"\r\n--X", b"X", b"a", b"\x00"])),
    st.lists(st.integers(0, 200)),
)
def test_a_form_may_be_cut_anywhere(parts, cuts):
    """And the file may resemble the boundary, as long as it is not one."""
    data = b"".join(parts).replace(b"\r\n--XX", b"")
    while b"\r\n--XX" in b"\r\n" + data:
        data = data.replace(b"--XX", b"", 1)
    body, form_of = form(FILE.replace(b"{}", data), PURPOSE), UploadForm()
    form_of.begin("multipart/form-data; boundary=XX")
    places = sorted({0, len(body), *(min(cut, len(body)) for cut in cuts)})
    taken = b""
    for start, end in pairwise(places):
        form_of.feed(body[start:end])
        taken += form_of.take()
    form_of.check_end()
    assert (taken, form_of.file_name, form_of.fields) == (data, "a", {"purpose": "batch"})


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value


def expiry(anchor: bytes, seconds: bytes) -> bytes:
    return form(PURPOSE, FILE, field(b"expires_after[anchor]", anchor), field(b"expires_after[seconds]", seconds))


def named(name: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n{}'


@each(
    ("body", "status", "param"),
    [
        (form(PURPOSE), 400, "file"),
        (form(FILE), 400, "purpose"),
        (form(FILE, FILE, PURPOSE), 400, "file"),
        (form(PURPOSE, PURPOSE, FILE), 400, "purpose"),
        (form(PURPOSE.replace(b"batch", b"fine-tune"), FILE), 400, "purpose"),
        (form(PURPOSE.replace(b"batch", b"b" * 100), FILE), 400, "purpose"),
        (form(PURPOSE, FILE, b'Content-Disposition: form-data; name="more"\r\n\r\n1'), 400, None),
        (form(PURPOSE, b"X: y\r\n\r\n{}"), 400, None),
        (expiry(b"created_at", b"10"), 400, "expires_after"),
        (expiry(b"created_at", b"x"), 400, "expires_after"),
        (expiry(b"created_at", b"99999999"), 400, "expires_after"),
        (expiry(b"created_at", b"3600.5"), 400, "expires_after"),
        (expiry(b"now", b"3600"), 400, "expires_after"),
        (form(PURPOSE, FILE, field(b"expires_after[seconds]", b"3600")), 400, "expires_after"),
        (form(PURPOSE, FILE, end=b""), 400, None),
        (form(PURPOSE, FILE, end=b"--XX"), 400, None),
        (form(PURPOSE, FILE, boundary=b"XY"), 400, None),
        (form(PURPOSE, b"A" * 10_000 + b": b\r\n\r\n"), 400, None),
        (form(PURPOSE, b"\r\n".join(b"A%d: b" % number for number in range(100)) + b"\r\n\r\n"), 400, None),
        (form(*[PURPOSE.replace(b"purpose", b"a")] * 50), 400, None),
        (b"", 400, None),
        (b"\x00" * 1000, 400, None),
        (b"{}", 400, None),
    ],
)
def test_wrong_forms(http, options, body, status, param):
    """Each is refused with its reason, and nothing of it stays."""
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    response = http.post("/v1/files", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert left(options) == (0, 0)


@each(
    "kind",
    [
        *("application/json", "multipart/form-data", "multipart/form-data; boundary=", "", "text/plain; boundary=XX"),
        f"multipart/form-data; boundary={'X' * 300}",
    ],
)
def test_wrong_types(http, kind):
    response = http.post("/v1/files", content=form(PURPOSE, FILE), headers={"Content-Type": kind})
    assert response.status_code in (400, 415)
    assert response.json()["error"]["param"] == "Content-Type"


@each(
    ("name", "shown"),
    [
        (b"a.jsonl", "a.jsonl"),
        (b"../../etc/passwd", "passwd"),
        (b"/etc/passwd", "passwd"),
        (b"C:\\\\temp\\\\x", "x"),
        (b"a\x00b\x1b[31m", "a?b?[31m"),
        ("\N{EURO SIGN}".encode(), "\N{EURO SIGN}"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"x" * 1000, "x" * 255),
        (b"", "upload.jsonl"),
        (b"..", ".."),
    ],
)
def test_names_are_only_shown(http, name, shown):
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    response = http.post("/v1/files", content=form(PURPOSE, named(name)), headers=headers)
    assert response.json()["filename"] == shown


@each("data", [b"--XX", b"\r\n--X", b"\r\n--XY\r\n" * 9, b"\r\n" * 99, b"\x00\xff" * 99, b"--XX--\r\n", b"\r\n-", b""])
def test_any_bytes_are_kept(http, data):
    """Also such as look like the boundary. An upload may be cut anywhere into pieces."""
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    body = form(PURPOSE, FILE.replace(b"{}", data))
    for size in (1, 7, len(body)):
        pieces = (body[start : start + size] for start in range(0, len(body), size))
        response = http.post("/v1/files", content=pieces, headers=headers)
        assert response.status_code == 200, response.text
        assert http.get(f"/v1/files/{response.json()['id']}/content").content == data


@each("origin", ["http://evil.example", "null"])
def test_a_form_of_a_foreign_page(http, options, origin):
    """A browser sends it without asking."""
    response = http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a", DATA)}, headers={"Origin": origin}
    )
    assert response.status_code == 403
    own = {"Origin": str(http.base_url)}
    assert (
        http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", DATA)}, headers=own).status_code == 200
    )


def head(length: int) -> bytes:
    return (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=XX\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_an_upload_that_breaks_off(gateway, options, api):
    """Nothing of it stays."""
    begun = form(PURPOSE, FILE.replace(b"{}", bytes(500_000)), end=b"")
    with raw(gateway) as connection:
        connection.sendall(head(900_000) + begun)
        wait_until(lambda: left(options)[1] > 0)
    wait_until(lambda: left(options) == (0, 0))


def test_a_slow_upload(gateway, options, api):
    started = time.monotonic()
    with raw(gateway) as connection:
        connection.sendall(head(900_000) + form(PURPOSE, FILE, end=b""))
        answer = connection.recv(65536)
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert time.monotonic() - started < 25
    assert left(options) == (0, 0)


def test_keys_see_their_own_files(broker, options, tmp_path):
    """And each takes up half of the store at most."""
    path = tmp_path / "keys.toml"
    keys = [make_key(path, name) for name in ("alice", "bob")]
    own = options | {"batches": str(tmp_path / "b"), "api_keys": str(path)}
    with (
        running(broker.address, **own) as gateway,
        openai_client(gateway, keys[0]) as alice,
        openai_client(gateway, keys[1]) as bob,
    ):
        file = alice.files.create(file=("a", bytes(1_000_000)), purpose="batch")
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        assert list(bob.files.list()) == []
        with pytest.raises(openai.RateLimitError, match="of one key"):
            alice.files.create(file=("a", bytes(1_000_000)), purpose="batch")
        assert bob.files.create(file=("a", bytes(1_000_000)), purpose="batch").id
        assert len(list(alice.files.list())) == 1


def test_off(broker):
    with running(broker.address, batches="none") as gateway, connected(gateway) as http:
        for path in ("/v1/files", "/v1/batches"):
            response = http.get(path)
            assert response.status_code == 404
            assert "serve.batches" in response.json()["error"]["message"]


def test_a_store_that_cannot_be_used(broker, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"x" * 5000)
    with running(broker.address, batches=str(path)) as gateway, connected(gateway) as http:
        response = http.get("/v1/files")
        assert response.status_code == 503
        assert "serve.batches" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 200
    assert path.read_bytes() == b"x" * 5000


@each("query", ["limit=0", "limit=x", "limit=10001", "limit=1e3", "order=up", "after=file-none"])
def test_wrong_queries(http, query):
    assert http.get(f"/v1/files?{query}").status_code in (400, 404)
