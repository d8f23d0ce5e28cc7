"""What runs where, with which arguments, and the steps of an upgrade."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from specq import __version__
from specq.config import BrokerConfig, Config, DraftConfig, RayConfig, ServeConfig, TargetConfig, UpConfig, load
from specq.protocol import ConfigError
from specq.ray.plan import (
    READY,
    STARTING,
    STOPPING,
    ClusterNode,
    NodeCheck,
    Numbers,
    ProcessSpec,
    Running,
    check_config,
    check_node,
    most_numbers,
    next_steps,
    one_address,
    plan,
    start_numbers,
)

SERVED = UpConfig(targets=1, drafters=0, serve=True)
JOURNAL = "postgresql://specq@db.example.org/specq"
NODES = [ClusterNode(f"n{i}", f"10.0.0.{i}", cpus=4) for i in range(1, 6)]
GPU_NODES = [ClusterNode(f"g{i}", f"10.0.1.{i}", cpus=8, gpus=4) for i in (1, 2)]
CONFIG = Config(
    broker=BrokerConfig(journal=JOURNAL, keys="/etc/keys"),
    target=TargetConfig(model="large", keys="/etc/keys"),
    draft=DraftConfig(model="small", keys="/etc/keys"),
    up=UpConfig(targets=2, drafters=4),
    ray=RayConfig(brokers=2),
)


def by_name(config=CONFIG, nodes=NODES, **more) -> dict[str, ProcessSpec]:
    return {one.name: one for one in plan(config, nodes, start_numbers(config), **more).processes}


def served(target: TargetConfig = CONFIG.target, **section) -> Config:
    """Return a configuration with a verifier, two brokers and two gateways."""
    return replace(CONFIG, up=SERVED, target=target, serve=ServeConfig(**{"keys": "/etc/keys"} | section))


def option(spec: ProcessSpec, name: str) -> str:
    return spec.arguments[spec.arguments.index(name) + 1]


def test_brokers_and_verifiers_are_spread_and_drafters_are_beside_verifiers():
    found = by_name()
    assert found["broker-1"].node_id != found["broker-2"].node_id
    targets = {found[f"target-{i}"].node_id for i in (1, 2)}
    assert len(targets) == 2
    assert Counter(found[f"draft-{i}"].node_id for i in range(1, 5)) == dict.fromkeys(targets, 2)


def test_each_broker_listens_at_its_node_and_keeps_its_port():
    found = by_name()
    hosts = {node.node_id: node.address for node in NODES}
    for number, name in enumerate(("broker-1", "broker-2")):
        assert found[name].address == f"tcp://{hosts[found[name].node_id]}:{5750 + number}"
        assert option(found[name], "--bind") == found[name].address
    assert set(found["draft-1"].brokers) == {found["broker-1"].address, found["broker-2"].address}
    assert option(found["target-1"], "--bind") == f"tcp://{hosts[found['target-1'].node_id]}:*"


def test_on_one_machine_all_stay_on_the_loopback():
    nodes = [replace(node, address="10.0.0.1") for node in NODES]
    assert one_address(nodes) == "10.0.0.1"
    assert one_address(NODES) == ""
    found = by_name(nodes=nodes, only_at="10.0.0.1")
    assert [found[name].address for name in ("broker-1", "broker-2")] == [
        "tcp://127.0.0.1:5750",
        "tcp://127.0.0.1:5751",
    ]
    assert "--bind" not in found["target-1"].arguments
    moved = plan(CONFIG, [*NODES[1:], nodes[0]], start_numbers(CONFIG), only_at="10.0.0.1")
    assert {one.node_id for one in moved.processes} == {"n1"}


def test_a_wildcard_stays_and_is_advertised_at_the_node():
    config = replace(CONFIG, broker=replace(CONFIG.broker, bind="tcp://0.0.0.0:6000"))
    found = by_name(config)["broker-2"]
    assert option(found, "--bind") == "tcp://0.0.0.0:6001"
    assert option(found, "--advertise") == found.address == f"tcp://10.0.0.{found.node_id[1:]}:6001"


def test_other_machines_reach_nothing_without_keys():
    config = replace(CONFIG, broker=replace(CONFIG.broker, keys=""))
    with pytest.raises(ConfigError, match="give --keys"):
        by_name(config)
    served = replace(CONFIG, up=replace(CONFIG.up, serve=True))
    with pytest.raises(ConfigError, match="give --api-keys and --tls-cert"):
        by_name(served)


def test_gateways_are_as_many_as_brokers():
    config = replace(CONFIG, up=replace(CONFIG.up, serve=True), serve=ServeConfig(insecure=True))
    found = by_name(config)
    assert {found[f"gateway-{i}"].address.rpartition(":")[2] for i in (1, 2)} == {"8000", "8001"}
    assert found["gateway-1"].node_id != found["gateway-2"].node_id


def test_a_verifier_has_its_gpus_on_one_node_and_drafters_none():
    own = (("vllm", ("tensor_parallel_size=4",)),)
    config = replace(CONFIG, target=replace(CONFIG.target, engine="vllm", own=own))
    found = by_name(config, NODES + GPU_NODES)
    assert {found[f"target-{i}"].node_id for i in (1, 2)} == {"g1", "g2"}
    assert found["target-1"].gpus == 4
    assert {found[f"draft-{i}"].gpus for i in range(1, 5)} == {0}
    assert found["broker-1"].node_id.startswith("n")
    assert "distributed_executor_backend" not in " ".join(found["target-1"].arguments)


def test_a_verifier_larger_than_a_node_is_placed_by_vllm():
    own = (("vllm", ("tensor_parallel_size=8",)),)
    config = replace(CONFIG, up=UpConfig(targets=1, drafters=0), target=replace(CONFIG.target, engine="vllm", own=own))
    target = by_name(config, GPU_NODES)["target-1"]
    assert target.gpus == 0
    assert 'distributed_executor_backend="ray"' in target.arguments
    too_large = plan(config, GPU_NODES[:1], Numbers(target=1))
    assert too_large.waiting == {
        "target-1": "target-1 needs 1 CPUs and 8 GPUs on one node, and none of 1 nodes has that free"
    }
    on_cpus = by_name(config)["target-1"]
    assert (on_cpus.gpus, 'distributed_executor_backend="ray"' in on_cpus.arguments) == (0, False)


def test_a_small_gpu_is_shared_by_drafters():
    config = replace(CONFIG, ray=replace(CONFIG.ray, draft_gpus=0.25))
    found = by_name(config, NODES + GPU_NODES)
    assert {found[f"draft-{i}"].node_id[0] for i in range(1, 5)} == {"g"}
    assert found["draft-1"].gpus == 0.25


def test_who_has_a_place_keeps_it_and_others_move():
    before = {name: one.node_id for name, one in by_name().items()}
    left = [node for node in NODES if node.node_id != before["broker-1"]]
    after = {name: one.node_id for name, one in by_name(nodes=left, kept=before).items()}
    moved = {name for name, place in after.items() if place != before[name]}
    assert moved == {name for name, place in before.items() if place == before["broker-1"]}
    assert after["broker-1"] != after["broker-2"]


def test_what_has_no_place_waits_with_a_reason():
    found = plan(CONFIG, NODES[:1], start_numbers(CONFIG))
    assert len(found.processes) == 4
    assert set(found.waiting) == {f"draft-{i}" for i in range(1, 5)}
    assert found.waiting["draft-1"] == "draft-1 needs 1 CPUs on one node, and none of 1 nodes has that free"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(CONFIG, broker=BrokerConfig()), "several brokers need journal = postgresql://"),
        (replace(CONFIG, broker=BrokerConfig(journal=JOURNAL, bind="tcp://127.0.0.1:*")), "a fixed port"),
        (replace(CONFIG, draft=DraftConfig(keys="keys")), "draft.keys is keys; give an absolute path"),
        (replace(CONFIG, ray=RayConfig(draft_gpus=1.5)), "ray.draft_gpus is 1.5; give a whole number"),
        (replace(CONFIG, ray=RayConfig(draft_gpus=0.00001)), "ray.draft_gpus is 1e-05"),
        (replace(CONFIG, ray=RayConfig(max_targets=1)), "ray.max_targets is 1, less than 2"),
        (served(bind="tcp://127.0.0.1:5750"), "serve.bind and broker.bind both take port 5750"),
        (served(bind="tcp://127.0.0.1:5749"), "serve.bind and broker.bind both take port 5750"),
        (served(bind="tcp://127.0.0.1:65535"), "serve.bind takes 2 ports from 65535 on"),
        (served(target=TargetConfig(keys="/etc/keys", bind="tcp://127.0.0.1:8001")), "target.bind and serve.bind"),
        (replace(CONFIG, target=TargetConfig(keys="/etc/keys", bind="tcp://127.0.0.1:6000")), "verifiers need port *"),
        (served(keys=""), "broker.keys is set and serve.keys is not"),
        (replace(CONFIG, draft=DraftConfig()), "broker.keys is set and draft.keys is not"),
        (replace(CONFIG, broker=BrokerConfig(journal=JOURNAL)), "target.keys is set and broker.keys is not"),
        (replace(CONFIG, broker=BrokerConfig(journal="postgresql:specq")), "write postgresql://"),
    ],
)
def test_wrong_configurations_are_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        check_config(config)


@pytest.mark.parametrize(
    "config",
    [
        *(CONFIG, served(), served(bind="tcp://127.0.0.1:5752")),
        replace(CONFIG, serve=ServeConfig(bind="tcp://127.0.0.1:5750")),  # no gateway runs
        served(target=TargetConfig(keys="/etc/keys", bind="none")),
        replace(CONFIG, up=SERVED, broker=BrokerConfig(journal=JOURNAL), target=TargetConfig(), draft=DraftConfig()),
    ],
)
def test_right_configurations_are_taken(config):
    check_config(config)


def test_the_section_is_read_and_gives_the_numbers(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("[up]\ntargets = 1\n[ray]\nbrokers = 2\nmax_targets = 3\nmax_drafters = 4\n")
    config = load(path)
    assert start_numbers(config) == Numbers(broker=2, target=1, draft=1, gateway=0)
    assert most_numbers(config) == Numbers(broker=2, target=3, draft=4, gateway=0)
    path.write_text("[ray]\ndrafters = 2\n")
    with pytest.raises(ConfigError, match="max_drafters"):
        load(path)


def test_arguments_have_paths_of_keys_and_nothing_of_their_content(tmp_path: Path):
    """Ray keeps the arguments of actors, and its dashboard shows them."""
    for name in ("broker.secret", "broker.pub"):
        (tmp_path / name).write_text("very-secret-value")
    config = replace(CONFIG, broker=replace(CONFIG.broker, keys=str(tmp_path)))
    said = repr(plan(config, NODES, start_numbers(config)))
    assert str(tmp_path) in said
    assert "very-secret-value" not in said


def test_a_node_that_is_open_or_has_another_version_is_refused():
    open_node = NodeCheck(__version__, has_token=False)
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.1 .* RAY_AUTH_MODE=token"):
        check_node(NODES[0], open_node)
    with pytest.raises(ConfigError, match=r"has specq 0\.1, not"):
        check_node(NODES[0], NodeCheck("0.1", has_token=True))
    check_node(replace(NODES[0], address="127.0.0.1"), open_node)
    check_node(NODES[0], NodeCheck(__version__, has_token=True))


def test_a_process_sees_the_gpus_that_ray_gave_its_actor():
    given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3"}
    spec = by_name()["target-1"]
    assert spec.environment(given) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": ""}
    assert replace(spec, gpus=2).environment(given) == given
    spanning = replace(spec, arguments=('distributed_executor_backend="ray"',))
    assert spanning.environment(given | {"CUDA_VISIBLE_DEVICES": ""}) == {"PATH": "/bin"}


# --- steps ------------------------------------------------------------------------------------------------------------


def present(specs, **states) -> dict[str, Running]:
    return {one.name: Running(one, states.get(one.name.replace("-", "_"), READY)) for one in specs}


def test_what_is_missing_starts_at_once_and_what_is_too_much_stops():
    wanted = plan(CONFIG, NODES, start_numbers(CONFIG)).processes
    assert next_steps(wanted, {}) == [("start", one.name) for one in wanted]
    fewer = [one for one in wanted if one.name != "draft-4"]
    assert next_steps(fewer, present(wanted)) == [("stop", "draft-4")]
    assert next_steps(fewer, present(wanted, draft_4=STOPPING)) == []
    assert next_steps(wanted, present(wanted)) == []


def test_an_upgrade_replaces_one_at_a_time_in_order_and_waits():
    """Each process once: brokers, verifiers, draft workers; the next one only when all are ready."""
    wanted = plan(CONFIG, NODES, start_numbers(CONFIG)).processes
    there = present([replace(one, version="0.1") for one in wanted])
    order = []
    for _ in wanted:
        ((step, name),) = next_steps(wanted, there)
        assert step == "stop"
        there[name] = Running(there[name].spec, STOPPING)
        assert next_steps(wanted, there) == []
        del there[name]
        assert next_steps(wanted, there) == [("start", name)]
        there[name] = Running(next(one for one in wanted if one.name == name), STARTING)
        assert next_steps(wanted, there) == []
        there[name] = replace(there[name], state=READY)
        order.append(name)
    assert order == [one.name for one in wanted]
    assert next_steps(wanted, there) == []


def test_a_failed_process_is_replaced_first():
    wanted = plan(CONFIG, NODES, start_numbers(CONFIG)).processes
    there = present([replace(one, version="0.1") for one in wanted], draft_2="failed with status 2")
    assert next_steps(wanted, there) == [("stop", "draft-2")]


def test_a_broker_that_moved_restarts_no_worker():
    wanted = plan(CONFIG, NODES, start_numbers(CONFIG)).processes
    there = present([replace(one, brokers=("tcp://10.0.0.9:5750",)) for one in wanted])
    assert next_steps(wanted, there) == []


def test_brokers_get_new_addresses_one_at_a_time_while_the_workers_wait_for_them():
    wanted = plan(CONFIG, NODES, start_numbers(CONFIG)).processes
    config = replace(CONFIG, broker=replace(CONFIG.broker, bind="tcp://127.0.0.1:6750"))
    former = plan(config, NODES, start_numbers(config)).processes
    there = present(former, **{one.name.replace("-", "_"): STARTING for one in former if one.role != "broker"})
    assert next_steps(wanted, there) == [("stop", "broker-1")]
    there["broker-1"] = Running(wanted[0], STARTING)
    assert next_steps(wanted, there) == []
    there["broker-1"] = Running(wanted[0], READY)
    assert next_steps(wanted, there) == [("stop", "broker-2")]
