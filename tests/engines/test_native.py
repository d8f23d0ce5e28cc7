"""The C kernels: the same bits in any batch, exact packing, and a portable path where they cannot be built."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

from specq.engines.models import rank_tokens
from specq.engines.native import HostForward
from specq.engines.native.compiler import kernels
from specq.engines.native.rows import PackedRows, RowPacker
from specq.engines.native.top import top_tokens
from specq.engines.native.weights import BF16, BLOCK_TYPES, F32, Arena, BlockWeight, PackedMatrix, pack
from specq.engines.torch.generic import GenericForward
from specq.engines.torch.loading import load
from specq.engines.torch.native import host_forward
from specq.engines.torch.row_noise import RowNoise, Sampling, noise_of
from specq.engines.torch.top import rank_rows
from specq.protocol import SamplingParams
from specq.runtime import compiler
from specq.testing.checkpoints import make_checkpoint, path_tokens, random_tokens, random_tree

KINDS = ("llama", "llama-bias", "llama-bf16", "qwen2", "qwen3")

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")


def chain_rows(token_ids: list[int], start: int, table: np.ndarray, *, judged: bool) -> PackedRows:
    packer = RowPacker()
    packer.add_session(table)
    packer.add_chain(token_ids, table[start : start + len(token_ids)].tolist(), start, judged)
    return packer.pack()


@pytest.fixture(params=KINDS, scope="module")
def directory(request, tmp_path_factory):
    return str(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 13, 64, 300])
def test_a_prefill_of_any_length_gives_the_bits_of_one_token_at_a_time(directory, length):
    """What `deterministic` promises, with no near-ties: logits do not depend on how rows are batched."""
    rng = np.random.default_rng(length)
    token_ids = random_tokens(rng, length).tolist()
    one_by_one = load(directory, device="cpu", kv_slots=512).forward
    at_once = load(directory, device="cpu", kv_slots=512).forward
    assert isinstance(at_once, HostForward)
    table, other = rng.permutation(512).astype(np.int32), np.arange(512, dtype=np.int32)
    for i, token_id in enumerate(token_ids):
        expected = one_by_one(chain_rows([token_id], i, other, judged=True))
    output = at_once(chain_rows(token_ids, 0, table, judged=True))
    assert np.array_equal(expected.logits, output.logits)
    assert np.array_equal(expected.hidden, output.hidden)


def test_tree_nodes_give_the_bits_of_plain_rows(directory):
    """Each path of a random tree, verified in one pass with 15 other sessions, against plain decoding."""
    rng = np.random.default_rng(0)
    loaded = load(directory, device="cpu", kv_slots=2048)
    plain = load(directory, device="cpu", kv_slots=512).forward
    slots = rng.permutation(2048).astype(np.int32)
    trees, contexts, packer, taken = [], [], RowPacker(), 0
    for session in range(16):
        context, tree = random_tokens(rng, 3 + 5 * session).tolist(), random_tree(rng, session)
        table = slots[taken : taken + len(context)]
        node_slots = slots[taken + len(context) : taken + len(context) + tree.num_nodes].tolist()
        taken += len(context) + tree.num_nodes
        loaded.forward(chain_rows(context[:-1], 0, table, judged=False))
        packer.add_session(table)
        packer.add_chain(context[-1:], table[-1:].tolist(), len(context) - 1, judged=True)
        for node in range(tree.num_nodes):
            line = [node_slots[i] for i in ancestors(tree.parents, node)]
            position = len(context) + len(line) - 1
            packer.add_node(int(tree.token_ids[node]), line[-1], position, len(context), line)
        trees.append(tree)
        contexts.append(context)
    logits = iter(loaded.forward(packer.pack()).logits)
    for context, tree in zip(contexts, trees, strict=True):
        for node in range(-1, tree.num_nodes):
            text = context + path_tokens(tree, node)
            expected = plain(chain_rows(text, 0, np.arange(512, dtype=np.int32), judged=True)).logits[0]
            assert np.array_equal(next(logits), expected)


def ancestors(parents: np.ndarray, node: int) -> list[int]:
    """Return the nodes from the context's child down to this one."""
    line: list[int] = []
    while node >= 0:
        line.append(node)
        node = int(parents[node])
    return line[::-1]


def packed(*weights: torch.Tensor, interleave: bool = False) -> PackedMatrix:
    return pack(kernels(), Arena(1 << 20), [weight.numpy() for weight in weights], interleave)


def test_weights_are_halved_only_where_that_is_exact():
    weight = torch.randn(32, 24)
    assert packed(weight).format == F32
    rounded = weight.to(torch.bfloat16).float()
    half = packed(rounded)
    assert (half.format, half.num_panels, half.k) == (BF16, 2, 24)
    pairs = torch.from_numpy(half.data).view(torch.int32).view(2, 24, 8)
    low, high = (pairs << 16).view(torch.float32), (pairs & -65536).view(torch.float32)
    assert torch.equal(torch.cat([low, high], -1).transpose(1, 2).reshape(32, 24), rounded)


def test_matrices_are_packed_one_below_the_other_or_in_turns():
    weights = [torch.randn(24, 8), torch.randn(24, 8)]
    for interleave in (False, True):
        panels = torch.from_numpy(packed(*weights, interleave=interleave).data).view(torch.float32).view(3, 8, 16)
        expected = torch.stack([w.view(3, 8, 8) for w in weights], 1) if interleave else torch.cat(weights)
        assert torch.equal(panels.transpose(1, 2).reshape(48, 8), expected.reshape(48, 8))
    padded = packed(torch.ones(17, 8))
    assert padded.num_panels == 2
    assert np.count_nonzero(padded.data.view(np.int16)) == 17 * 8


def random_blocks(kind: str, num_rows: int, k: int, rng: np.random.Generator) -> tuple[BlockWeight, torch.Tensor]:
    """Return blocks as GGUF lays them out, and what they dequantise to in float32."""
    scale, minimum = (rng.normal(0, 0.05 if kind == "Q4_1" else 0.003, (2, num_rows, k // 32, 1))).astype(np.float16)
    minimum[..., 0].flat[0] = np.float16(3e-7)  # one that half precision holds only as a subnormal number
    if kind == "Q4_1":
        numbers = rng.integers(0, 16, (num_rows, k // 32, 32), np.uint8)
        low, high = numbers[..., :16], numbers[..., 16:]
        parts = scale.view(np.uint8), minimum.view(np.uint8), low | high << 4
        values = scale.astype(np.float32) * numbers + minimum.astype(np.float32)
    else:
        numbers = rng.integers(-128, 128, (num_rows, k // 32, 32), np.int8)
        parts = scale.view(np.uint8), numbers.view(np.uint8)
        values = scale.astype(np.float32) * numbers
    blocks = np.concatenate(parts, -1).reshape(num_rows, -1)
    return BlockWeight(kind, blocks), torch.from_numpy(values.reshape(num_rows, k))


@pytest.mark.parametrize("kind", list(BLOCK_TYPES))
def test_a_files_blocks_give_the_bits_of_their_values(tmp_path, kind):
    """Each number of rows takes another tile, or the way by which a panel is expanded once for all of them."""
    network = AutoModelForCausalLM.from_pretrained(make_checkpoint("qwen2", tmp_path), dtype=torch.float32)
    rng, blocks = np.random.default_rng(0), {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % 32 == 0 and "k_proj" not in name:
            blocks[name], values = random_blocks(kind, module.out_features, module.in_features, rng)
            module.weight = torch.nn.Parameter(values)
    plain, quantised = (host_forward(network, 512, kernels(), blocks=given) for given in ({}, blocks))
    for held in (plain.kv.keys, plain.kv.values, quantised.kv.keys, quantised.kv.values):
        held[:] = 0
    assert {plain.native._model.head.format, quantised.native._model.head.format} == {F32, BLOCK_TYPES[kind][0]}
    table, start = rng.permutation(512).astype(np.int32), 0
    for length in (*range(1, 15), 40, 100):
        rows = chain_rows(random_tokens(rng, length).tolist(), start, table, judged=True)
        start += length
        expected, output = plain(rows), quantised(rows)
        assert np.isfinite(expected.logits).all()
        assert np.array_equal(expected.logits, output.logits)
    assert np.array_equal(plain.kv.keys, quantised.kv.keys)
    assert np.array_equal(plain.kv.values, quantised.kv.values)


@pytest.fixture
def builds_anew():
    """Libraries are looked for anew, in this test and after it."""
    compiler.library.cache_clear()
    yield
    compiler.library.cache_clear()


@pytest.mark.usefixtures("builds_anew")
def test_without_a_compiler_the_portable_path_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with structlog.testing.capture_logs() as logs:
        assert isinstance(load(str(make_checkpoint("llama", tmp_path)), device="cpu").forward, GenericForward)
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("warning", "kernel_build_failed")]
    assert "slower" in logs[0]["reason"]


@pytest.mark.usefixtures("builds_anew")
def test_a_compiler_that_fails_is_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(compiler, "FLAGS", ("--no-such-flag",))
    assert kernels() is None


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """A source that is built at once, and a home without libraries."""
    monkeypatch.setattr(compiler.Path, "home", lambda: tmp_path)
    path = tmp_path / "kernels" / "small.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return 42; }\n")
    return path


def test_the_library_is_built_once_and_found_again(small_source):
    path = compiler.built(small_source, "cc")
    built = path.stat().st_mtime_ns
    assert compiler.built(small_source, "cc") == path
    assert path.stat().st_mtime_ns == built
    assert {path, path.with_suffix(".sha256"), path.with_suffix(".lock")} == {*path.parent.iterdir()}


@pytest.mark.parametrize("part", [0, 100, 4_000])
def test_a_library_that_is_not_whole_is_built_again(small_source, part):
    """As a loss of power may leave it: to load it would end the process by SIGBUS."""
    path = compiler.built(small_source, "cc")
    whole = path.read_bytes()
    assert len(whole) > part
    path.write_bytes(whole[:part])
    assert compiler.built(small_source, "cc") == path
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("num_rows", "width", "count"), [(1, 1, 1), (3, 99, 5), (8, 4096, 16), (2, 20, 20)])
def test_top_tokens_equal_torch(num_rows, width, count):
    torch.manual_seed(width)
    scores = (torch.randn(num_rows, width + 3) * 4)[:, :width]  # rows that are not contiguous
    token_ids, log_probs = top_tokens(scores.numpy(), count)
    expected = scores.log_softmax(-1).topk(count)
    assert expected.indices.tolist() == token_ids.tolist()
    np.testing.assert_allclose(log_probs, expected.values.numpy(), atol=1e-5)


def test_top_tokens_of_a_row_with_few_candidates_and_of_equal_ones():
    assert top_tokens(np.zeros((1, 40), np.float32), 3)[0].tolist() == [[0, 1, 2]], "the lower token comes first"
    scores = torch.full((2, 30), -torch.inf)
    scores[:, [7, 3]] = torch.tensor([2.0, 1.0])
    token_ids, log_probs = top_tokens(scores.numpy(), 4)
    assert token_ids[:, :2].tolist() == [[7, 3]] * 2
    assert np.isfinite(log_probs).sum(-1).tolist() == [2, 2]
    assert np.exp(log_probs).sum(-1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("names", [None, [1, 2, 4, 8, 16, 32]])
def test_rows_ranked_by_keys_are_those_of_the_sampler(names):
    """Where the host has no part in it: greedy and sampled rows, tokens by name, in torch."""
    width = 40 if names is None else len(names)
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 3
    params = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=2.0, seed=5)]
    token_ids = None if names is None else np.array(names, np.int32)
    inverse, keys = noise_of([Sampling.of(own) for own in params], np.array([[7], [8], [9]]))
    noise = RowNoise(torch.from_numpy(inverse), torch.from_numpy(keys[:, 0]))
    found = rank_rows(logits, noise, 4, None if token_ids is None else torch.from_numpy(token_ids))
    expected = rank_tokens(logits, params, [7, 8, 9], 4, token_ids)
    assert found[0].tolist() == expected[0].tolist()
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
