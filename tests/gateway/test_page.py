"""The page's files and what it asks for: headers, the broker's state, what a stream says of each token."""

from __future__ import annotations

import json
import re

from specq.gateway.guard import make_key
from specq.gateway.routes.service import FILES
from specq.testing.fake_broker import ANSWER
from tests.each import each
from tests.gateway.serving import connected, running

CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}


def test_the_page_loads_only_its_own_files(http):
    """Its files refer only to each other, and the browser may load no others."""
    found = {name for name in FILES if "." in name}
    named = set[str]()
    for name in found:
        response = http.get(f"/page/{name}")
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(
            r"(?<!xmlns=.)(?<!NS\(.)https?://", response.text.replace("http://www.w3.org/2000/svg", "")
        )
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\son\w+=", response.text)
        named |= set(re.findall(r'(?:/page/|from "\./)([\w.]+)', response.text))
    assert named == found - {"index.html"}


def test_the_page_is_at_the_root(http):
    response = http.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy


@each("name", ["x.js", "..%2fapp.py", "__pycache__", "%2e%2e/guard.py"])
def test_other_files_are_not_served(http, name):
    response = http.get(f"/page/{name}")
    assert response.status_code == 404
    assert "import" not in response.text


def test_the_state_is_the_brokers_report(http):
    report = http.get("/specq/status").json()
    assert report["models"] == ["fake"]
    assert report["workers"] == [{"role": "target", "state": "ready"}]
    assert report["version"]
    assert report["faults"] == [], "they tell of other callers' jobs"


def test_with_keys_the_page_is_open_and_the_state_is_not(broker, own_cache, tmp_path):
    make_key(tmp_path / "api.toml", "alice")
    with running(broker.address, api_keys=str(tmp_path / "api.toml")) as gateway, connected(gateway) as http:
        assert [http.get(path).status_code for path in ("/", "/page/main.js", "/specq/status")] == [200, 200, 401]
        assert http.get("/", headers={"Host": "evil.example"}).status_code == 421


@each("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_where_tokens_come_from_if_asked(http, path):
    """The texts of all tokens are the text; without being asked no chunk has the field."""
    body = CHAT if "chat" in path else {"prompt": "a", "stream": True, "max_tokens": 60}
    told = chunks(http.post(path, json={**body, "explain": True}))
    tokens = [token for chunk in told for token in chunk.get("specq", {}).get("tokens", ())]
    assert "".join(token["text"] for token in tokens) == ANSWER
    assert {token["origin"] for token in tokens} == {"draft worker", "plain"}
    assert not any("specq" in chunk for chunk in chunks(http.post(path, json=body)))


def chunks(response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@each(
    ("changes", "message"),
    [({"explain": 1}, "explain is a number"), ({"stream": False, "explain": True}, "without stream")],
)
def test_explain_is_a_flag_of_streams(http, changes, message):
    response = http.post("/v1/chat/completions", json={**CHAT, **changes})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
