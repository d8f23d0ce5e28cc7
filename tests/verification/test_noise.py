"""The noise: the same bits everywhere, finite at the edges, uniform, and independent in every coordinate."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.testing import oracle
from specq.verification import noise, torch_noise
from specq.verification.noise import Domain, derived_seed
from tests.each import each

SEEDS = st.integers(0, 2**63 - 1)
COUNT = 1 << 16


def hashes(domain, seeds, positions, token_ids):
    keys = noise.row_keys(seeds, positions, domain)
    return noise.hash_tokens(keys, np.asarray(token_ids, np.int32))


@given(SEEDS, st.integers(0, 2**31), st.integers(0, 300_000), st.sampled_from(Domain))
def test_hash_and_gumbel_are_the_oracles(seed, position, token, domain):
    keys = noise.row_keys([seed], [position], domain)
    token_ids = np.array([token], np.int32)
    assert int(noise.hash_tokens(keys, token_ids)[0, 0]) + 2**31 == oracle.hash32(domain, seed, position, token)
    assert noise.gumbel(keys, token_ids)[0, 0] == oracle.gumbel(domain, seed, position, token)


def test_numpy_and_torch_agree_on_wide_rows():
    keys = noise.row_keys([0, 2**63 - 1, 7], [0, 131_071, 8], Domain.GUMBEL)
    token_ids = np.arange(151_936, dtype=np.int32)
    by_numpy = noise.gumbel(keys, token_ids)
    by_torch = torch_noise.gumbel_torch(torch.from_numpy(keys), torch.from_numpy(token_ids)).numpy()
    assert by_numpy.dtype == by_torch.dtype == np.float32
    assert np.array_equal(by_numpy.view(np.int32), by_torch.view(np.int32))


def test_torchs_own_integer_arithmetic_gives_the_same_hash():
    """What runs on a GPU, here on the CPU."""
    keys = noise.row_keys(list(range(50)), list(range(50)), Domain.DRAFT)
    token_ids = np.arange(5000, dtype=np.int32)
    key0, key1 = torch.from_numpy(keys).split(1, dim=1)
    by_torch = noise.mix(torch.from_numpy(token_ids), key0, key1)
    assert np.array_equal(noise.hash_tokens(keys, token_ids), by_torch.numpy())


@each(("hash_", "value"), [(0, 22.873857), (2**31, -math.log(math.log(2))), (2**32 - 1, -3.1299987)])
def test_edges_of_the_hash_are_finite(hash_, value):
    held = np.array([hash_ - 2**31], np.int32)
    assert noise.gumbel_of_hash(held)[0] == pytest.approx(value, abs=1e-5)
    assert torch_noise.gumbel_of_hash_torch(torch.from_numpy(held))[0] == noise.gumbel_of_hash(held)[0]
    assert 0 < noise.uniforms(held)[0] < 1


def test_mutant_infinite_noise_at_a_hash_edge(monkeypatch):
    """The usual h * 2**-32 is 0 at h = 0."""
    monkeypatch.setattr(noise, "uniforms", lambda hashes: (hashes.astype(np.float64) + 2**31) * 2.0**-32)
    with np.errstate(divide="ignore"):
        assert np.isinf(noise.gumbel_of_hash(np.array([-(2**31)], np.int32))[0])


@each(("domain", "along"), product([*Domain], ["seed", "position", "token"]))
def test_uniform_along_each_coordinate(along, domain):
    counter = list(range(COUNT))
    zero = [3] * COUNT
    if along == "token":
        drawn = hashes(domain, [12345], [3], counter)[0]
    else:
        drawn = hashes(domain, counter if along == "seed" else zero, counter if along == "position" else zero, [77])
    u = noise.uniforms(np.sort(drawn.ravel()))
    distance = np.abs(u - (np.arange(COUNT) + 0.5) / COUNT).max()
    assert distance < 2.0 / math.sqrt(COUNT)  # Kolmogorov and Smirnov: p = 0.0007
    counts = np.bincount((noise.uniforms(drawn.ravel()) * 256).astype(int), minlength=256)
    chi2 = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum()
    assert abs(chi2 - 255) < 4 * math.sqrt(2 * 255)


@each("along", ["seed", "position", "token", "domain"])
def test_neighbours_are_independent(along):
    """Serial correlation of neighbours, of their every bit, and of their low with their high halves."""
    counter = np.arange(COUNT)
    base = {"seed": counter, "position": counter * 7, "token": counter % 64}
    first = hashes(Domain.GUMBEL, base["seed"], base["position"], base["token"][:, None])[:, 0]
    moved = dict(base) if along == "domain" else base | {along: base[along] + 1}
    domain = Domain.DRAFT if along == "domain" else Domain.GUMBEL
    second = hashes(domain, moved["seed"], moved["position"], moved["token"][:, None])[:, 0]
    limit = 4.5 / math.sqrt(COUNT)
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    assert abs(np.corrcoef(first & 0xFFFF, second >> 16)[0, 1]) < limit
    bits = [((h.view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(float) for h in (first, second)]
    agreement = (bits[0] == bits[1]).mean(0)
    assert np.abs(agreement - 0.5).max() < limit


def test_each_input_bit_flips_half_of_the_output_bits():
    count = 20_000
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**63, count, np.uint64)
    positions, tokens = rng.integers(0, 2**20, count), rng.integers(0, 2**18, count)
    first = hashes(Domain.GUMBEL, seeds, positions, tokens[:, None]).view(np.uint32)
    flips = (
        [(seeds ^ np.uint64(1 << b), positions, tokens) for b in range(63)]
        + [(seeds, positions ^ (1 << b), tokens) for b in range(20)]
        + [(seeds, positions, tokens ^ (1 << b)) for b in range(18)]
    )
    for moved in flips:
        changed = first ^ hashes(Domain.GUMBEL, moved[0], moved[1], moved[2][:, None]).view(np.uint32)
        flipped = ((changed >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
        assert np.abs(flipped - 0.5).max() < 5.5 * 0.5 / math.sqrt(count)


def test_two_positions_of_one_seed_are_not_the_same_row_in_another_order():
    """One 32-bit key alone would make rows permutations of each other."""
    rows = hashes(Domain.GUMBEL, [1] * 64, range(64), np.arange(4096))
    for i in range(1, 64):
        assert len(np.intersect1d(rows[0], rows[i])) < 3


def test_argmax_of_noisy_logits_follows_the_softmax():
    distribution = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    keys = noise.row_keys([11] * COUNT, range(COUNT), Domain.GUMBEL)
    drawn = (np.log(distribution) + noise.gumbel(keys, np.arange(5, dtype=np.int32))).argmax(1)
    counts = np.bincount(drawn, minlength=5)
    chi2 = ((counts - COUNT * distribution) ** 2 / (COUNT * distribution)).sum()
    assert chi2 < 18.5  # p = 0.001 at 4 degrees of freedom


def test_derived_seeds_differ_and_stay_in_range():
    seeds = {derived_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
