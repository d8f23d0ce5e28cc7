"""The compiled forward without torch: arrays in, arrays out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specq.engines.native import kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")

RUN = """
import sys

sys.modules.update(torch=None, transformers=None)  # an import of either fails

import numpy as np

from specq.engines.native import DecoderLayer, NativeWeights, Linear, NativeForward, RowPacker, kernels

VOCAB, HIDDEN, HEADS, HEAD_DIM, SLOTS = 40, 32, 2, 16, 64
rng = np.random.default_rng(0)

def random(*shape):
    return rng.normal(0, 0.3, shape).astype(np.float32)

def norm():
    return np.ones(HIDDEN, np.float32)

layer = DecoderLayer(
    attn_norm=norm(), mlp_norm=norm(), q_norm=None, k_norm=None,
    qkv=Linear([random(HIDDEN, HIDDEN) for _ in range(3)]),
    out=Linear([random(HIDDEN, HIDDEN)]),
    gate_up=Linear([random(48, HIDDEN) for _ in range(2)], interleaves=True),
    down=Linear([random(HIDDEN, 48)]),
)
angles = np.arange(SLOTS, dtype=np.float32)[:, None] / 10000.0 ** (np.arange(HEAD_DIM // 2, dtype=np.float32) / 8)
embedding = random(VOCAB, HIDDEN)
weights = NativeWeights(
    num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, intermediate=48, eps=1e-6, scale=HEAD_DIM**-0.5,
    embedding=embedding, final_norm=norm(), cos=np.cos(angles), sin=np.sin(angles), layers=[layer],
    head=Linear([embedding]),
)
forward = NativeForward(weights, *np.zeros((2, 1, HEADS, SLOTS, HEAD_DIM), np.float32), kernels())

def rows(token_ids, start, table):
    packer = RowPacker()
    packer.add_session(table)
    packer.add_chain(token_ids, table[start : start + len(token_ids)].tolist(), start, True)
    return packer.pack()

tokens, first, second = [3, 1, 4, 1, 5], *np.arange(SLOTS, dtype=np.int32).reshape(2, -1)
for i, token in enumerate(tokens):
    expected = forward(rows([token], i, first))
found = forward(rows(tokens, 0, second))
assert found.logits.shape == (1, VOCAB) and np.isfinite(found.logits).all()
assert np.array_equal(found.logits, expected.logits) and np.array_equal(found.hidden, expected.hidden)
print("done")
"""


def test_it_computes_where_torch_cannot_be_imported():
    ran = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("done\n", "")
