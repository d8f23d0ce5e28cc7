"""What `specq ray up` and `specq ray status` say, without a cluster."""

from __future__ import annotations

import itertools
from unittest.mock import MagicMock

import pytest

pytest.importorskip("ray")

from specq.config import BrokerConfig, Config, ServeConfig
from specq.protocol import ConfigError, EngineError
from specq.ray import deployment
from specq.ray.actors import ProcessHealth
from specq.ray.controller import ClusterController, ClusterStatus, ProcessRow
from specq.ray.plan import READY, STARTING, ClusterNode, Numbers, PlacedProcesses, ProcessSpec, Running

pytestmark = [pytest.mark.machines, pytest.mark.filterwarnings("default")]

SECRET = "postgresql://specq:very-secret@db.example.org/specq"
WHY = "no model at /no/such"


def test_a_failed_start_says_why_and_what_to_do(monkeypatch):
    row = ProcessRow("target-1", "failed with status 2", reason=WHY)
    found = ClusterStatus((row,), Numbers(), {}, is_settled=False, num_nodes=1, gains={})
    monkeypatch.setattr(deployment, "status", lambda: found)
    monkeypatch.setattr(deployment, "LOOK_S", 0.0)
    monkeypatch.setattr(deployment.time, "monotonic", itertools.count(step=deployment.FAILED_S).__next__)
    with pytest.raises(EngineError, match=f"target-1 failed with status 2: {WHY}\n.*specq ray down"):
        deployment._wait_settled(lambda line: None, deadline=1e9)
    assert f"target-1: {WHY}" in deployment.table(found).splitlines()


def test_a_cluster_that_does_not_answer_may_lack_the_token(monkeypatch):
    """Ray reports a wrong token as a failed connection."""

    def fail(**_options):
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379\nmore")

    monkeypatch.setattr(deployment.ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"at 10\.0\.0\.1:6379\).*RAY_ADDRESS.*auth_token"), deployment.connected():
        pass


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch, free_address):
    """Ray tries to reach it for many minutes."""
    named = free_address.removeprefix("tcp://")
    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(deployment.ray, "init", lambda **_options: pytest.fail("Ray was asked"))
    with pytest.raises(ConfigError, match=f"nothing listens at {named}"), deployment.connected():
        pass


@pytest.mark.parametrize(
    "config",
    [Config(broker=BrokerConfig(journal=SECRET)), Config(serve=ServeConfig(batches=SECRET))],
)
def test_ray_sees_no_password(config: Config):
    """Nothing was asked of Ray yet, which this test has not started."""
    with pytest.raises(ConfigError, match="has a password") as found:
        deployment.up(config, lambda line: None)
    assert "very-secret" not in str(found.value)


@pytest.fixture
def controller(monkeypatch):
    """A controller whose thread and cluster are away."""
    monkeypatch.setattr(ClusterController, "_adopt", lambda self: None)
    monkeypatch.setattr(ClusterController, "_run", lambda self: None)
    return ClusterController


def rows(controller, spec: ProcessSpec, state: str) -> tuple[ProcessRow, ...]:
    nodes = [ClusterNode("n1", "10.0.0.1")]
    wanted, present = PlacedProcesses((spec,), {}), {spec.name: Running(spec, state)}
    controller._note(wanted, present, Numbers(), nodes, is_settled=state == READY)
    return controller.status().rows


def test_why_a_process_ended_is_shown_until_it_is_ready(controller):
    """Its actor ends too, so the next actor does not know it."""
    made = controller(Config())
    spec = ProcessSpec("target-1", "target", "n1", (), 1, 0)
    made._note_end("target-1", ProcessHealth(spec, 7, 1.0, 2, is_stopping=False, last_line=f"specq: {WHY}"))
    made._note_end("target-1", ProcessHealth(spec, 8, 0.0, None, is_stopping=False))
    assert rows(made, spec, STARTING)[0].reason == WHY
    assert rows(made, spec, READY)[0].reason == ""
    assert rows(made, spec, STARTING)[0].reason == ""


@pytest.mark.parametrize(("certificate", "shown"), [("", "http://"), ("/etc/cert.pem", "https://")])
def test_a_gateway_is_shown_as_its_clients_name_it(controller, certificate: str, shown: str):
    made = controller(Config(serve=ServeConfig(tls_cert=certificate, tls_key=certificate)))
    spec = ProcessSpec("gateway-1", "gateway", "n1", (), 1, 0, address="tcp://10.0.0.1:8000")
    assert rows(made, spec, READY)[0].listens_at == f"{shown}10.0.0.1:8000"


def test_a_broker_whose_keys_are_not_there_is_shown_as_failed(controller):
    """The controller has no keys to ask it with, and must go on."""
    made = controller(Config(broker=BrokerConfig(keys="/no/such")))
    spec = ProcessSpec("broker-1", "broker", "n1", (), 1, 0, address="tcp://127.0.0.1:5750")
    made.specs["broker-1"] = spec
    made.health["broker-1"] = ProcessHealth(spec, 7, 1.0, 2, is_stopping=False, last_line="specq: no keys")
    reports = made._reports()
    assert reports == {}
    assert made._present(reports)["broker-1"].state == "failed with status 2"


@pytest.mark.parametrize("answers", [0, 1])
def test_a_controller_that_another_command_ended_is_named(monkeypatch, answers: int):
    """Two commands at once: the later one goes on, and `down` says why it ends, at its first call or its second."""
    given = iter(range(answers))

    def get(_answer: object, **_options: object) -> int:
        for one in given:
            return one
        raise deployment.ActorDiedError

    monkeypatch.setattr(deployment, "find_controller", MagicMock())
    monkeypatch.setattr(deployment.ray, "get", get)
    with pytest.raises(EngineError, match="another `specq ray up` or `specq ray down` ended the controller"):
        deployment.down()
