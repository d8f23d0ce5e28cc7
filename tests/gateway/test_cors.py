"""Browser front ends: pages of the named origins may send requests, others may not. All else stays the same."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import ServeConfig, to_arguments
from specq.gateway.guard import make_key
from specq.protocol import ConfigError
from tests.each import each
from tests.gateway.serving import connected, running

HOME, OTHER = "https://chat.example.org", "http://localhost:3000"
PATH = "/v1/chat/completions"
BODY = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def keyed(_broker, tmp_path_factory):
    """A gateway with keys for pages of two origins, and a key."""
    keys = tmp_path_factory.mktemp("keys") / "api.toml"
    key = make_key(keys, "alice")
    with running(_broker.address, api_keys=str(keys), cors_origins=(HOME, OTHER)) as gateway:
        yield gateway, key


@pytest.fixture
def http(keyed):
    gateway, key = keyed
    with connected(gateway) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        yield client


@each("origin", [HOME, OTHER])
def test_a_browser_asks_first_and_without_a_key(http, origin):
    """The preflight allows any headers that a client library adds."""
    http.headers.pop("Authorization", None)
    answer = http.options(PATH, headers={"Origin": origin, **ASKS})
    assert answer.status_code == 200
    assert answer.headers[ALLOW] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-os"))
    assert "access-control-allow-credentials" not in answer.headers


def test_answers_and_refusals_can_be_read_by_its_pages(http):
    answer = http.post(PATH, json=BODY, headers={"Origin": HOME})
    assert (answer.status_code, answer.headers[ALLOW]) == (200, HOME)
    assert "Origin" in answer.headers["vary"]
    with http.stream("POST", PATH, json=BODY | {"stream": True}, headers={"Origin": HOME}) as streamed:
        assert (streamed.status_code, streamed.headers[ALLOW]) == (200, HOME)
        assert "[DONE]" in streamed.read().decode()
    refused = http.post(PATH, json=BODY, headers={"Origin": HOME, "Authorization": "Bearer none"})
    assert (refused.status_code, refused.headers[ALLOW]) == (401, HOME)


@each("origin", ["https://evil.example", f"{HOME}.evil.example", "null", HOME.replace("https", "http")])
def test_pages_of_other_origins_are_kept_out(http, origin):
    """By the browser: it receives no CORS permission."""
    first = http.options(PATH, headers={"Origin": origin, **ASKS})
    assert first.status_code == 400
    assert ALLOW not in first.headers
    assert ALLOW not in http.post(PATH, json=BODY, headers={"Origin": origin}).headers


def test_the_guard_also_applies_without_a_browser(http):
    """Keys, and names of hosts."""
    assert http.post(PATH, json=BODY).status_code == 200
    assert http.get("/v1/models", headers={"Origin": HOME, "Host": "evil.example"}).status_code == 421


def test_all_origins(broker, own_cache):
    with running(broker.address, cors_origins=("*",)) as gateway, connected(gateway) as client:
        assert client.options(PATH, headers={"Origin": HOME, **ASKS}).headers[ALLOW] in ("*", HOME)
        assert client.post(PATH, json=BODY, headers={"Origin": HOME}).headers[ALLOW] == "*"


def test_the_option_is_repeated(monkeypatch):
    """As what `specq up` hands to its gateway."""
    given = []
    monkeypatch.setattr("specq.processes.gateway.run", lambda config: given.append(config) or 0)
    config = ServeConfig(cors_origins=(HOME, "*"))
    assert to_arguments(config) == ["--cors-origin", HOME, "--cors-origin", "*"]
    assert CliRunner().invoke(main, ["serve", *to_arguments(config)]).exit_code == 0
    assert given == [config]


@each("origin", ["chat.example.org", f"{HOME}/", f"{HOME}/page", "null", "https://*.example.org", ""])
def test_what_no_browser_would_send_is_refused(origin):
    with pytest.raises(ConfigError, match=r"serve.cors_origins has .* which is not an origin"):
        ServeConfig(cors_origins=(HOME, origin))


def test_a_model_says_when_it_was_first_served(http):
    first, again = (http.get("/v1/models").json()["data"][0]["created"] for _ in range(2))
    assert 1_700_000_000 < first == again
    assert http.get("/v1/models/fake").json()["created"] == first
