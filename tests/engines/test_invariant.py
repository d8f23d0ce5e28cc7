"""`batch_invariant`: a row's logits, keys and values have the same bits in any step. Most of it needs a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specq.engines.native.rows import pack_steps
from specq.engines.torch import loading
from specq.engines.torch.cuda import invariant
from specq.engines.torch.cuda.weights import DecoderWeights
from specq.protocol import ConfigError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep, Tree
from specq.testing.checkpoints import make_checkpoint
from tests.devices import HAS_CUDA

GREEDY = SamplingParams()
# Hidden size, layers, query heads, key-value heads, intermediate size; Qwen2 (biases) with tied embeddings or not.
SHAPES = [(3584, 28, 28, 4, 18944, True), (4096, 32, 32, 8, 14336, False), (896, 24, 14, 2, 4864, True)]
LENGTH, NUM_OTHERS, VOCAB, NUM_SLOTS = 700, 90, 5000, 90_000


def weights_of(num_columns: int) -> DecoderWeights:
    """Return weights of which only the products' matrices count."""
    matrix = torch.randn(24, num_columns)
    layer: Any = type("Layer", (), {"qkv": matrix, "out": matrix, "gate_up": matrix, "down": matrix})
    return type("Weights", (), {"layers": [layer], "head": matrix})  # type: ignore[return-value]


def exact(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return (rows.double() @ matrix.double()).float()


def product_of(differing: set[int]) -> Any:
    """Return a product that is exact for most numbers of rows, and not for some."""

    def multiply(rows: torch.Tensor, matrix: torch.Tensor, name: str) -> torch.Tensor:
        found = exact(rows, matrix.T)
        found[-1, -1] += 1e-3 * (len(rows) in differing and name == "head")
        return found

    return multiply


def test_numbers_of_rows_whose_products_differ_are_not_used(monkeypatch):
    monkeypatch.setattr(invariant.torch, "mm", exact)
    equal = invariant.EqualProducts(weights_of(32), product_of({1, 64, 96}), 16)
    assert equal.among((1, 16, 32, 48, 64, 80, 96, 112)) == (16, 32, 48, 80, 112)


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_a_product_is_turned_where_that_is_faster_and_equal_and_slow_numbers_of_rows_are_left_out(monkeypatch, error):
    """32 rows are slow for most matrices. 48 are slow for the matrix of 1000 columns, unless it is turned."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return exact(left, right) + error * (len(left) == 1000)

    def timed(work: Any) -> float:
        lines, columns = work().shape
        if lines == 1000:
            return 90.0
        return 200.0 if (lines, columns) in {(32, 24), (48, 1000)} else 95.0

    monkeypatch.setattr(invariant.torch, "mm", mm)
    weights = weights_of(32)
    weights.layers[0].down = torch.randn(1000, 32)  # type: ignore[misc]
    equal = invariant.EqualProducts(weights, product_of(set()), 16, timed)
    assert equal.among((1, 16, 32, 48, 64)) == ((1, 16, 64) if error else (1, 16, 48, 64))
    assert equal.turned == (set() if error else {("down", 48)})


def test_a_device_whose_products_depend_on_the_rows_is_refused(monkeypatch):
    monkeypatch.setattr(invariant.torch, "mm", exact)
    with pytest.raises(ConfigError, match=r"batch_invariant: .*\(3 of 4 numbers\); set it to false"):
        invariant.EqualProducts(weights_of(32), product_of({32, 48, 64}), 16).among((16, 32, 48, 64))


def test_a_torch_that_cannot_forbid_splits_is_refused(monkeypatch):
    def no_library(name: str) -> None:
        raise RuntimeError(f"compiled without {name}")

    monkeypatch.setattr(invariant.torch.backends.cuda, "preferred_blas_library", no_library)
    with pytest.raises(ConfigError, match=r"splitting sums \(compiled without cublaslt\); 2\.11 for CUDA can"):
        invariant.forbid_splits()


def test_a_device_without_our_kernels_is_refused(tmp_path, monkeypatch):
    checkpoint = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(loading, "pick_device", lambda _: torch.device("meta"))
    with pytest.raises(ConfigError, match=r"batch_invariant needs .* an NVIDIA GPU .*float32 on meta"):
        loading.load(str(checkpoint), batch_invariant=True)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def make_network(shape: tuple[int, int, int, int, int, bool]) -> Any:
    """Return a model with dense random weights, also in its biases."""
    hidden, layers, heads, kv_heads, inner, is_qwen = shape
    config, made = (Qwen2Config, Qwen2ForCausalLM) if is_qwen else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(hidden)
    with torch.device("cuda"):
        network = made(
            config(
                hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
                num_hidden_layers=layers, vocab_size=VOCAB, max_position_embeddings=4096, tie_word_embeddings=is_qwen,
            )
        ).to(torch.bfloat16)  # fmt: skip
    for name, values in network.named_parameters():
        values.data.normal_(1.0 if "norm" in name else 0.0, 0.02)
    return network.eval()


class Serving:
    """A text that is computed beside others, in steps of any form, with its own tokens among the drafts."""

    def __init__(self, forward: Any, text: np.ndarray, seed: int) -> None:
        self.forward, self.text, self.rng = forward, text, np.random.default_rng(seed)
        self.free = self.rng.permutation(NUM_SLOTS).astype(np.int32).tolist()
        self.tables: list[list[int]] = [[] for _ in range(1 + NUM_OTHERS)]
        self.logits: dict[int, torch.Tensor] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def run(self, most_chunk: int, most_others: int, most_drafts: int, first: int = 0) -> None:
        """Compute the whole text; `first`: tokens of the first chunk."""
        while len(self.tables[0]) < len(self.text):
            start = len(self.tables[0])
            most = min(
                first if first and not start else int(self.rng.integers(1, most_chunk + 1)), len(self.text) - start
            )
            num_true = min(int(self.rng.integers(0, most_drafts + 1)), len(self.text) - start - most)
            self.step(start, most, num_true, int(self.rng.integers(0, most_others + 1)))

    def step(self, start: int, num_tokens: int, num_true: int, num_others: int) -> None:
        steps, slots = [], []
        tree, places = self.tree(self.text[start + num_tokens :][:num_true])
        for session in [0, *self.rng.choice(NUM_OTHERS, num_others, replace=False) + 1]:
            table = self.tables[session]
            count = num_tokens if session == 0 else int(self.rng.integers(1, 30 if not table else 2))
            tokens = self.text[start : start + count] if session == 0 else self.tokens(count)
            own = tree if session == 0 else self.tree(self.tokens(int(self.rng.integers(0, 3))))[0]
            steps.append(SessionStep(int(session), len(table), tokens, GREEDY, own))
            new = self.take(count)
            table += new
            nodes = self.take(own.num_nodes)
            slots += new + nodes
            if session == 0:
                of_nodes = nodes
        tables = [np.array(self.tables[step.session_id], np.int32) for step in steps]
        logits = self.forward(pack_steps(steps, np.array(slots, np.int32), tables)).logits
        self.logits[start + num_tokens - 1] = logits[0].clone()
        for depth, place in enumerate(places):
            self.logits[start + num_tokens + depth] = logits[1 + place].clone()
        self.tables[0] += [of_nodes[place] for place in places[: int(self.rng.integers(0, num_true + 1))]]

    def tree(self, true: np.ndarray) -> tuple[Tree, list[int]]:
        """Return a tree of a branch and wrong siblings, and where the branch's nodes are in it."""
        tokens, parents, places, last = [], [], [], -1
        for token in true.tolist():
            for own in [*self.tokens(int(self.rng.integers(0, 3))).tolist(), token]:
                tokens.append(own)
                parents.append(last)
            last = len(tokens) - 1
            places.append(last)
        if not tokens:
            return NO_TREE, []
        return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(len(tokens), np.float32)), places

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(1, VOCAB, count).astype(np.int32)

    def kv(self) -> torch.Tensor:
        table = self.tables[0][: len(self.text)]
        return torch.stack([self.forward.kv.keys[:, :, table], self.forward.kv.values[:, :, table]]).clone()


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA or importlib.util.find_spec("triton") is None, reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape[0]))
def test_logits_keys_and_values_have_the_same_bits_in_any_step(shape):
    """A text alone, token by token; in chunks; beside up to 90 others, with its tokens as nodes of draft trees."""
    from specq.engines.torch.cuda.forward import NARROW, FusedForward

    network = make_network(shape)
    forward = FusedForward(network, loading._make_kv(network, NUM_SLOTS), is_invariant=True)
    assert set(NARROW) <= set(forward.jumps)
    text = np.random.default_rng(5).integers(1, VOCAB, LENGTH).astype(np.int32)
    alone = Serving(forward, text, 0)
    alone.run(1, 0, 0, first=300)
    wanted = alone.kv()
    assert bool(torch.isfinite(wanted).all())
    for seed, (most_chunk, most_others, most_drafts) in enumerate([(900, 0, 0), (40, 0, 6), (3, NUM_OTHERS, 6)]):
        other = Serving(forward, text, 1 + seed)
        other.run(most_chunk, most_others, most_drafts)
        assert torch.equal(other.kv(), wanted)
        common = other.logits.keys() & alone.logits.keys()
        assert len(common) >= (1 if most_chunk > LENGTH else 30)
        assert [place for place in sorted(common) if not torch.equal(other.logits[place], alone.logits[place])] == []
