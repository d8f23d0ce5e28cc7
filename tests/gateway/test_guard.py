"""Who gets in: API keys, names of hosts, limits; and that another address takes keys and TLS."""

from __future__ import annotations

import os
import ssl
from itertools import product
from pathlib import Path

import openai
import pytest

from specq.config import ServeConfig
from specq.gateway.guard import ApiKeys, is_known, make_key
from specq.protocol import Accepted, ConfigError, Submit
from specq.testing.fake_broker import FakeBroker, answer
from specq.testing.waiting import wait_until
from tests.certificates import make_certificate
from tests.each import each
from tests.gateway.serving import BODY_BYTES, PATH, connected, openai_client, raw, request, running

BODY = {"prompt": "a"}


@pytest.fixture
def keys(tmp_path) -> Path:
    return tmp_path / "keys" / "api.toml"


@pytest.fixture
def secured(broker, own_cache, keys):
    """A gateway with a key of alice, who may claim priority 5."""
    key = make_key(keys, "alice", max_priority=5)
    with running(broker.address, api_keys=str(keys), requests_per_key=2) as gateway:
        yield gateway, key


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_opens_and_names_the_tenant(secured, broker):
    gateway, key = secured
    with openai_client(gateway, key) as api:
        assert api.models.list().data[0].id == "fake"
        api.completions.create(model="fake", prompt="a", extra_body={"priority": 5})
        with pytest.raises(openai.PermissionDeniedError, match="alice may claim at most 5"):
            api.completions.create(model="fake", prompt="a", extra_body={"priority": 6})
    (submit,) = broker.wait_for(Submit)
    assert (submit.tenant, submit.priority) == ("alice", 5)


def test_the_same_idempotency_key_of_two_callers_is_two_jobs(secured, broker, keys):
    """No caller reads, or learns of, the request of another."""
    gateway, key = secured
    other = make_key(keys, "bob")
    with connected(gateway) as http:
        for one in (key, key, other):
            headers = {"Authorization": f"Bearer {one}", "Idempotency-Key": "same"}
            assert http.post(PATH, json=BODY, headers=headers).status_code == 200
    first, again, third = (submit.job_id for submit in broker.wait_for(Submit, 3))
    assert first == again != third


@each(
    ("header", "path"),
    product(
        ["", "Bearer", "Bearer x", "Basic {}", "{}", "Bearer {}x", "Bearer \u00e9"],
        ["/v1/models", "/v1/completions", "/tokenize", "/nowhere"],
    ),
)
def test_requests_without_a_key_are_refused(secured, header, path):
    gateway, key = secured
    with connected(gateway) as http:
        response = http.get(path, headers={"Authorization": header.format(key).encode("latin-1")})

    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_state_takes_no_key(secured):
    with connected(secured[0]) as http:
        assert [http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200] * 3


def test_keys_come_and_go_while_it_runs(secured, keys):
    """An unreadable file does not change the keys."""
    gateway, key = secured
    other = make_key(keys, "bob")
    with connected(gateway) as http:

        def status(one):
            return http.get("/v1/models", headers={"Authorization": f"Bearer {one}"}).status_code

        assert (status(key), status(other)) == (200, 200)
        keys.write_text("nonsense")
        assert (status(key), status(other)) == (200, 200)
        keys.write_text("")
        assert (status(key), status(other)) == (401, 401)


def test_a_file_holds_no_key(keys):
    key = make_key(keys, "alice")

    assert key not in keys.read_text()
    assert keys.stat().st_mode & 0o077 == 0
    assert ApiKeys(keys).caller(key).name == "alice"
    with pytest.raises(ConfigError, match="already has a key of alice"):
        make_key(keys, "alice")


def test_a_key_that_takes_anothers_place_is_the_only_one(keys):
    """Though the file has the same size and time of writing."""
    first, before = make_key(keys, "alice"), keys.stat()
    callers, first_text = ApiKeys(keys), keys.read_text()
    keys.write_text("")
    second = make_key(keys, "alice")
    os.utime(keys, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert len(keys.read_text()) == len(first_text)
    callers.refresh()
    assert callers.caller(first) is None
    assert callers.caller(second).name == "alice"


@each("name", ["", "a b", "a/b", "a.b", "-a", "x" * 65, "é"])
def test_names_of_keys(keys, name):
    with pytest.raises(ConfigError, match="not a valid name"):
        make_key(keys, name)


@each(
    ("text", "said"),
    [
        ("[a]\nsha256 = 3", "is not an API key"),
        ("[a]\nsha256 = 'x'", "is not an API key"),
        (f"[a]\nsha256 = '{'0' * 64}'\nother = 1", "is not an API key"),
        (f"[a]\nsha256 = '{'0' * 64}'\nmax_priority = 2000", "is not an API key"),
        ("a = 3", "is not an API key"),
        ("[a", "not valid TOML"),
    ],
)
def test_invalid_key_files_are_refused(tmp_path, text, said):
    path = tmp_path / "api.toml"
    path.write_text(text)
    path.chmod(0o600)

    with pytest.raises(ConfigError, match=said):
        ApiKeys(path)


def test_concurrent_requests_are_limited_per_key(own_cache, keys):
    """Another key is served meanwhile, and room comes back."""
    first, second = make_key(keys, "alice"), make_key(keys, "bob")

    def silent(message):
        waits = isinstance(message, Submit) and message.tenant == "alice"
        return [Accepted(job_id=message.job_id)] if waits else answer(message)

    alice, bob = ({"Authorization": f"Bearer {key}"} for key in (first, second))
    with (
        FakeBroker(silent) as broker,
        running(broker.address, api_keys=str(keys), requests_per_key=1) as gateway,
        connected(gateway) as http,
    ):
        with raw(gateway) as waiting:
            waiting.sendall(request(BODY_BYTES, alice))
            broker.wait_for(Submit)
            refused = http.post(PATH, json=BODY, headers=alice)
            served = http.post(PATH, json=BODY, headers=bob)
        assert (refused.status_code, served.status_code) == (429, 200)
        assert refused.headers["retry-after"] == "1"
        wait_until(lambda: http.get("/v1/models", headers=alice).status_code == 200)


# --- names and addresses ----------------------------------------------------------------------------------------------


@each(
    ("host", "known"),
    [
        ("localhost", True), ("localhost:8000", True), ("127.0.0.1:8000", True), ("[::1]:8000", True),
        ("10.1.2.3", True), ("Llm.Example", True), ("evil.example", False), ("localhost.evil.example", False),
        ("", False), ("llm.example:8000:1", False),
    ],
)  # fmt: skip
def test_hosts(host, known):
    assert is_known(host, {"llm.example"}) is known


FOREIGN = ["evil.example", "localhost.evil.example", "evil.example:80@localhost", "127.0.0.1.evil.example"]


@each(("host", "statuses"), [*[(host, (421,)) for host in FOREIGN], ("", (400, 421)), ("[::1", (200, 400, 421))])
def test_a_foreign_host_is_refused(http, host, statuses):
    response = http.get("/v1/models", headers={"Host": host})

    assert response.status_code in statuses
    assert "access-control-allow-origin" not in response.headers
    assert host not in FOREIGN or response.json()["error"]["code"] == "unknown_host"


def test_no_foreign_page_may_read_or_ask(http):
    """No CORS; and a body that a form can send is not taken."""
    origin = {"Origin": "http://evil.example"}
    asked = http.options(PATH, headers={**origin, "Access-Control-Request-Method": "POST"})
    sent = http.post(PATH, content=BODY_BYTES, headers={"Content-Type": "text/plain", **origin})
    answered = http.post(PATH, json=BODY, headers=origin)

    assert (asked.status_code, sent.status_code, answered.status_code) == (405, 415, 200)
    headers = {*asked.headers, *sent.headers, *answered.headers}
    assert not [name for name in headers if name.startswith("access-control")]


@each(
    ("options", "said"),
    [
        ({"bind": "tcp://0.0.0.0:8000"}, "give --api-keys and --tls-cert"),
        ({"bind": "tcp://0.0.0.0:8000", "api_keys": "x"}, "give --tls-cert"),
        ({"bind": "tcp://10.0.0.1:8000", "tls_cert": "x", "tls_key": "y"}, "give --api-keys"),
        ({"tls_cert": "x"}, "must be set together"),
        ({"bind": "ipc:///tmp/x"}, "expected tcp"),
        ({"bind": "127.0.0.1:8000"}, "expected tcp://HOST:PORT"),
    ],
)
def test_addresses_that_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**options)


@each(
    "options",
    [
        {"bind": "tcp://0.0.0.0:8000", "insecure": True},
        {"bind": "tcp://0.0.0.0:8000", "api_keys": "x", "tls_cert": "x", "tls_key": "y"},
        {"bind": "tcp://[::1]:8000"},
    ],
)
def test_addresses_that_are_not(options):
    assert ServeConfig(**options).bind == options["bind"]


def test_tls(broker, own_cache, tmp_path):
    certificate, key = make_certificate(tmp_path, "gateway", "IP:127.0.0.1")
    options = {"tls_cert": str(certificate), "tls_key": str(key)}
    with (
        running(broker.address, **options) as gateway,
        connected(gateway, verify=ssl.create_default_context(cafile=str(certificate))) as http,
    ):
        assert http.post(PATH, json=BODY).status_code == 200


def test_certificates_that_cannot_be_used(broker, own_cache, tmp_path):
    path = tmp_path / "cert.pem"
    path.write_text("nonsense")

    with (
        pytest.raises(ConfigError, match=r"cert\.pem.* cannot be used"),
        running(broker.address, tls_cert=str(path), tls_key=str(path)),
    ):
        pass
