"""Whole CUDA graphs of vLLM's for steps with drafts: which are captured, and that vLLM finds them. On a CPU with all
but the graphs themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.padding import MIXED, graph_rows, graphs_up_to, mixed_up_to
from specq.testing.checkpoints import make_checkpoint, random_tokens
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.test_vllm import chain
from tests.engines.test_vllm_padding import even_engine, open_all

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


class Captures(list[Any]):
    """What a runner of vLLM's on a CPU captures, of graphs that are not real: the steps' descriptors, in order.
    `errors`: what capturing raises, by how many there are then."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.compilation import cuda_graph
        from vllm.forward_context import get_forward_context
        from vllm.platforms import current_platform
        from vllm.v1.worker import gpu_model_runner

        super().__init__()
        self.errors: dict[int, Exception] = {}
        self.num_calls = 0
        capture_model = runner.capture_model

        @contextmanager
        def captured(*_: Any, **__: Any) -> Iterator[None]:
            context = get_forward_context()
            found, metadata = context.batch_descriptor, next(iter(context.attn_metadata.values()))
            # Where requests have any number of rows, each of them may have all.
            each = metadata.max_query_len * (found.num_reqs if found.uniform else 1)
            assert each == len(metadata.slot_mapping) == found.num_tokens
            assert len(metadata.seq_lens) == found.num_reqs
            assert (
                int(metadata.seq_lens.max()) <= runner.max_model_len
            )  # else attention reads behind the requests' block tables
            if error := self.errors.pop(len(self), None):
                raise error
            yield
            self.append(found)

        def counted() -> int:
            self.num_calls += 1
            capture_model()
            return 1 << 20

        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", captured)
        monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: (0, 1))
        monkeypatch.setattr(cuda_graph, "current_stream", lambda: None)
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(gpu_model_runner, "graph_capture", lambda **_: nullcontext())
        monkeypatch.setattr(gpu_model_runner, "lock_workspace", lambda: None)
        monkeypatch.setattr(runner, "capture_model", counted)
        self._use_graphs(runner, monkeypatch)

    def _use_graphs(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the runner dispatch to graphs, and keep those that it captures."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        for name, value in {
            "cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY, "max_cudagraph_capture_size": 64,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64], "cudagraph_num_of_warmups": 1,
        }.items():  # fmt: skip
            monkeypatch.setattr(runner.compilation_config, name, value)
        usual = CudagraphDispatcher(runner.vllm_config)
        usual.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
        monkeypatch.setattr(runner, "cudagraph_dispatcher", usual)
        wrapper = CUDAGraphWrapper(runner.model, runner.vllm_config, CUDAGraphMode.FULL)
        monkeypatch.setattr(runner, "model", wrapper)
        self.kept = wrapper.concrete_cudagraph_entries


@pytest.fixture
def runner(directory: Path, vllm_device: str) -> Iterator[Any]:
    """The runner of an engine on a CPU: on a GPU it would capture real graphs."""
    if vllm_device != "cpu":
        pytest.skip("there it would capture real ones")
    engine, _ = even_engine(directory, vllm_device, kv_slots=2048, max_sessions=16, max_step_rows=128)
    yield engine._sessions._core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    engine.shutdown()


def decided(runner: Any, rows: list[int]) -> tuple[Any, Any]:
    """Return how vLLM's runner would run a step of requests with so many rows each: the mode, and the graph's
    descriptor."""
    found = runner._determine_batch_execution_and_padding(
        num_tokens=sum(rows), num_reqs=len(rows), num_scheduled_tokens_np=np.array(rows, np.int32),
        max_num_scheduled_tokens=max(rows), use_cascade_attn=False,
    )  # fmt: skip
    return found[0], found[1]


def test_graphs_are_possible_where_vllm_can_capture_and_use_them(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from specq.engines.vllm.patches.cuda_graphs import possible_graphs

    assert possible_graphs(runner) == {}
    bare = runner.model
    Captures(runner, monkeypatch)
    assert possible_graphs(runner) == {}  # its attention can be captured in no way
    builder = type(runner.attn_groups[0][0].get_metadata_builder())
    for support, expected in (
        ("ALWAYS", {MIXED: (4, 8, 16, 24, 32, 48, 64)}),
        ("UNIFORM_SINGLE_TOKEN_DECODE", {}),
        ("UNIFORM_BATCH", graphs_up_to(64, 16)),
    ):
        monkeypatch.setattr(builder, "get_cudagraph_support", lambda *_, found=support: AttentionCGSupport[found])
        assert possible_graphs(runner) == expected
    for name, value, most in (
        ("reorder_batch_threshold", 1, 1),
        ("reorder_batch_threshold", 4, 4),
        ("lora_config", object(), 1),
        ("model", bare, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, value)
            assert max(possible_graphs(runner), default=1) == most


def test_vllm_finds_a_graph_for_each_even_step(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's runner runs to capture, and what it decides on in a step, with all but the graphs themselves."""
    from vllm.config import CUDAGraphMode

    from specq.engines.vllm.patches.cuda_graphs import WholeGraphs

    captures, usual = Captures(runner, monkeypatch), runner.cudagraph_dispatcher
    runner.capture_model()
    plain = captures.copy()
    own, graphs = WholeGraphs(runner), graphs_up_to(64, 16)
    assert own.capture(graphs) == graphs
    assert captures.num_calls == 2  # in one more, since each has a stream, and so memory, of its own
    assert own.num_bytes == 1 << 20
    descriptors = captures[len(plain) :]
    assert descriptors[0].num_tokens == max(one.num_tokens for one in descriptors)
    assert len(set(captures)) == len(captures.kept) == len(plain) + sum(map(len, graphs.values()))
    assert runner.cudagraph_dispatcher is usual

    for length, counts in graphs.items():
        for count in range(1, counts[-1] + 1):
            own.use(length)
            mode, descriptor = decided(runner, [length] * count)
            assert mode == CUDAGraphMode.FULL
            assert descriptor in descriptors
            assert (descriptor.num_tokens, descriptor.num_reqs) == (
                graph_rows(counts, length, count),
                graph_rows(counts, length, count) // length,
            )
            assert (
                decided(runner, [length] * count + [length - 1 or 7])[0] == CUDAGraphMode.NONE
            )  # a step that is not even
    own.use(MIXED)
    assert decided(runner, [1, 1, 1]) == usual.dispatch(3, uniform_decode=True)
    assert decided(runner, [2, 2])[0] == CUDAGraphMode.NONE


def test_vllm_finds_a_graph_for_each_mixed_step(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for even ones; steps of one row each stay vLLM's own, and those that are larger than all graphs."""
    from vllm.config import CUDAGraphMode

    from specq.engines.vllm.patches.cuda_graphs import WholeGraphs

    captures, usual = Captures(runner, monkeypatch), runner.cudagraph_dispatcher
    runner.capture_model()
    plain, sizes = captures.copy(), mixed_up_to(64)
    own = WholeGraphs(runner)
    assert own.capture({MIXED: sizes}) == {MIXED: sizes}
    descriptors = captures[len(plain) :]
    assert [(one.num_tokens, one.num_reqs, one.uniform) for one in descriptors] == [
        (size, min(size, 16), False) for size in sizes[::-1]
    ]
    assert len(set(captures)) == len(captures.kept) == len(plain) + len(sizes)
    rng = np.random.default_rng(0)
    for num_rows in range(2, 65):
        num_sessions = int(rng.integers(1, min(num_rows - 1, 16) + 1))
        rows = 1 + np.bincount(rng.integers(0, num_sessions, num_rows - num_sessions), minlength=num_sessions)
        mode, descriptor = decided(runner, rows.tolist())
        assert mode == CUDAGraphMode.FULL
        assert descriptor in descriptors
        assert descriptor.num_tokens == min(size for size in sizes if size >= num_rows)
        assert descriptor.num_reqs >= num_sessions
    assert decided(runner, [1, 1, 1]) == usual.dispatch(3, uniform_decode=True)
    assert decided(runner, [60, 5])[0] == CUDAGraphMode.NONE
    own.leave_out([MIXED])
    assert len(captures.kept) == len(plain)
    assert decided(runner, [2, 2])[0] == CUDAGraphMode.NONE


def test_no_graph_has_more_rows_than_the_longest_text(
    directory: Path, vllm_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures it with requests as long as the step, of whose blocks its tables have no more than such a text
    has."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from specq.engines.vllm.patches.cuda_graphs import WholeGraphs, possible_graphs

    if vllm_device != "cpu":
        pytest.skip("there it would capture real ones")
    engine, _ = even_engine(directory, vllm_device, kv_slots=2048, max_step_rows=128, options={"max_model_len": 40})
    runner = engine._sessions._core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    captures = Captures(runner, monkeypatch)
    builder = type(runner.attn_groups[0][0].get_metadata_builder())
    monkeypatch.setattr(builder, "get_cudagraph_support", lambda *_: AttentionCGSupport.ALWAYS)
    found = possible_graphs(runner)
    assert WholeGraphs(runner).capture(found) == found == {MIXED: (4, 8, 16, 24, 32, 40)}
    assert captures[0].num_tokens == 40
    monkeypatch.setattr(runner.compilation_config, "max_cudagraph_capture_size", 0)  # of sizes that no step can have
    assert WholeGraphs(runner).capture(possible_graphs(runner)) == {}
    engine.shutdown()


def test_graphs_that_cannot_be_captured_are_left_out(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is missing, the larger half of those of one number of rows; else all. Whatever was captured of them
    is forgotten, and vLLM's own stay."""
    from vllm.compilation import monitor

    from specq.engines.vllm.patches.cuda_graphs import WholeGraphs

    captures, usual = Captures(runner, monkeypatch), runner.cudagraph_dispatcher
    runner.capture_model()
    plain, graphs = set(captures), graphs_up_to(64, 16)
    first = len(graphs[4])  # 16 sessions with 4 rows each, and 8 with 8, are the largest
    for error, expected, num_calls in (
        (torch.OutOfMemoryError("none is left"), graphs | {8: (1, 2, 4)}, 2),
        (RuntimeError("it cannot be captured"), {}, 1),
    ):
        captures.clear()
        captures.num_calls, captures.errors = 0, {first + 2: error}
        own = WholeGraphs(runner)
        found = own.capture(graphs)
        assert found == expected
        assert captures.num_calls == num_calls
        assert {(one.num_tokens, one.num_reqs) for one in set(captures.kept) - plain} == {
            (length * count, count) for length, counts in found.items() for count in counts
        }
        assert plain <= set(captures.kept)
        assert not monitor.cudagraph_capturing_enabled
        for length in (8, 3, 0):
            own.use(length)
            assert (runner.cudagraph_dispatcher is usual) == (length not in found)
            assert runner.uniform_decode_query_len == (length if length in found else 1)


def test_graphs_are_captured_and_say_what_pieces_say(directory: Path, vllm_device: str) -> None:
    """On a GPU, in bf16, for which vLLM's attention allows it: each step with drafts, once by a graph and once in
    pieces, on the same KV."""
    if vllm_device == "cpu":
        pytest.skip("needs a GPU")
    memory = vllm_arguments(vllm_device)["options"]
    engine = VllmEngine(str(directory), dtype="bfloat16", kv_slots=4096, max_sessions=16, options=memory)
    way: Any = engine._sessions
    graphs = way._graphs
    if not graphs:
        pytest.skip("vLLM's attention for this model allows none")
    model = way._core.model_executor.driver_worker.worker.model_runner.model
    there = {
        (one.num_tokens, one.num_reqs) for one in model.concrete_cudagraph_entries if one.num_tokens > one.num_reqs
    }
    assert there == {(length * count, count) for length, counts in graphs.items() for count in counts}
    rng, num_same, num_all = np.random.default_rng(7), 0, 0
    prompts = [random_tokens(rng, int(count)) for count in rng.integers(20, 90, 12)]
    for most in (1, 3, 7, 16):
        chains = [chain(random_tokens(rng, int(rng.integers(0, most + 1)))) for _ in prompts]
        chains[0] = chain(random_tokens(rng, most))
        said = []
        for used in (graphs, {}):
            way._graphs = used
            way._scheduler.reset_prefix_cache()
            texts = open_all(engine, [prompt.tolist() for prompt in prompts])
            found = engine.step([text.step(own) for text, own in zip(texts.values(), chains, strict=True)])
            said.append([one.token_ids.tolist() for one in found.judgements])
            for session_id in texts:
                engine.close(session_id)
        num_same += sum(one == other for one, other in zip(*said, strict=True))
        num_all += len(prompts)
    assert num_same >= 0.9 * num_all  # near ties may go either way
    engine.shutdown()
