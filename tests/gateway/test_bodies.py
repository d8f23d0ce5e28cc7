"""What clients put around a request: compressed bodies, byte order marks, other headers for keys, slashes in names."""

import gzip
import zlib
from dataclasses import replace
from urllib.parse import quote

import httpx2

from specq.gateway.guard import make_key
from specq.protocol import FetchTokenizer, GetStatus, Status
from specq.testing.fake_broker import ANSWER, INFO, FakeBroker, answer
from specq.testing.tokenizer import tokenizer_files
from specq.text import tokenizer_chunks
from tests.each import each
from tests.gateway.serving import JSON as PLAIN
from tests.gateway.serving import PATH, connected, running

JSON = b'{"prompt": "a", "max_tokens": 99}'
BOMB = zlib.compress(b" " * 20_000_000)


@each("path", [PATH, "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_a_compressed_body_is_refused_by_its_header(http, path):
    """With what would be accepted (RFC 9110, 15.5.16); it is not unpacked, so that nothing can grow."""
    for coding, body in (("gzip", gzip.compress(JSON)), ("deflate", BOMB), ("zstd", b"\x28\xb5\x2f\xfd"), ("x", JSON)):
        response = http.post(path, content=body, headers={**PLAIN, "Content-Encoding": coding})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (415, "Content-Encoding")
        assert error["message"] == f"Content-Encoding is {coding}; send the body uncompressed"
        assert response.headers["accept-encoding"] == "identity"


def test_a_second_content_encoding_is_seen_too(http):
    headers = [*PLAIN.items(), ("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
    assert http.post(PATH, content=JSON, headers=httpx2.Headers(headers)).status_code == 415


@each("coding", ["", "identity", "Identity"])
def test_a_body_that_is_said_to_be_plain_is_taken(http, coding):
    response = http.post(PATH, content=JSON, headers={**PLAIN, "Content-Encoding": coding})
    assert response.json()["choices"][0]["text"] == ANSWER


def test_a_byte_order_mark_before_a_body_is_skipped(http):
    """Programs on Windows write it. A mark anywhere else is not valid JSON."""
    marked, twice = (http.post(PATH, content=b"\xef\xbb\xbf" * n + JSON, headers=PLAIN) for n in (1, 2))

    assert marked.json()["choices"][0]["text"] == ANSWER
    assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_json")


def test_a_key_may_come_in_other_headers(broker, own_cache, tmp_path):
    """Beside a placeholder, which OpenAI's client always sends; none of them makes an invalid key valid."""
    key = make_key(tmp_path / "api.toml", "alice")
    with running(broker.address, api_keys=str(tmp_path / "api.toml")) as gateway, connected(gateway) as http:

        def status(**headers):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return http.get("/v1/models", headers=named).status_code

        for name in ("X_Api_Key", "x_api_key", "api_key", "Api_Key"):
            assert status(**{name: key}) == 200
            assert status(**{name: key, "Authorization": "Bearer none"}) == 200
            assert status(**{name: "none", "Authorization": f"Bearer {key}"}) == 200
            assert status(**{name: f"Bearer {key}"}) == status(**{name: ""}) == status(**{name: key + "x"}) == 401
        assert status(x_api_key="none", api_key=key) == 200
        for name, before in (("X-Api-Key", ""), ("api-key", ""), ("Authorization", "Bearer ")):
            twice = [(name, f"{before}none"), (name, f"{before}{key}")]
            assert http.get("/v1/models", headers=twice).status_code == 200
        assert status(Authorization=f"Basic {key}") == status(key=key) == 401
        refused = http.get("/v1/models").json()["error"]["message"]
        assert refused == "no valid API key; send one as Authorization: Bearer KEY, or as X-Api-Key or api-key: KEY"


def test_pages_of_other_sites_may_send_these_headers(broker, own_cache, tmp_path):
    make_key(tmp_path / "api.toml", "alice")
    page, wanted = "https://chat.example.org", "x-api-key,api-key,content-type"
    options = {"api_keys": str(tmp_path / "api.toml"), "cors_origins": (page,)}
    with running(broker.address, **options) as gateway, connected(gateway) as http:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        allowed = http.options(PATH, headers={"Origin": page, **asks})

    assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, wanted)


@each("name", ["org/model", "/models/a b", "a/", "ä/%2f"])
def test_a_models_name_may_have_slashes(own_cache, name):
    """Also at its ends, and however the client writes them; the list has a slash at its end or none."""

    def serving(message):
        if isinstance(message, FetchTokenizer):
            return list(tokenizer_chunks(replace(INFO, name=name), tokenizer_files()))
        if isinstance(message, GetStatus):
            return [Status(report={"models": [name], "workers": [{"role": "target", "state": "ready"}]})]
        return answer(message)

    with FakeBroker(serving) as broker, running(broker.address) as gateway, connected(gateway) as http:
        listed = [http.get(path) for path in ("/v1/models", "/v1/models/")]
        quoted = [http.get(f"/v1/models/{quote(name, safe=safe)}") for safe in ("/", "")]
        missing = http.get("/v1/models/no/such").json()["error"]

    assert [[model["id"] for model in one.json()["data"]] for one in listed] == [[name]] * 2
    assert [one.json().get("id") for one in quoted] == [name] * 2
    assert (missing["code"], missing["param"]) == ("model_not_found", "model")
