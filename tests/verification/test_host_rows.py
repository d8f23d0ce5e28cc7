"""The C kernels give what torch gives in float64, to the last bit where it matters; planted bugs in them are seen."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.testing import oracle
from specq.testing.random_steps import sampling_params
from specq.verification import drafting as draws
from specq.verification import host_kernels, host_rows
from specq.verification.host_kernels import kernels, make_rows
from specq.verification.host_logits import on_host
from specq.verification.host_rows import HostRows
from specq.verification.noise import Domain
from specq.verification.target_rows import Edits
from specq.verification.torch_rows import TorchRows
from tests.each import each
from tests.verification.mutants import mutated_kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")

SAMPLERS = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 300},
    {"temperature": 2.0, "top_p": 0.999, "min_p": 0.001},
    {"temperature": 1.0, "min_p": 0.3},
    {},
]


def logits_of(entropy, num_rows, vocab, *, spread=3.0, coarse=False):
    logits = np.random.default_rng(entropy).normal(0, spread, (num_rows, vocab)).astype(np.float32)
    return torch.from_numpy(np.round(logits) if coarse else logits)


def compare(logits, params, built=None):
    """Everything that is asked of target rows, of the kernels and of torch."""
    ways = HostRows(on_host(logits), built or kernels()), TorchRows(logits)
    rows = make_rows(params, range(50, 50 + len(params)))
    own = [way.own_tokens(rows)() for way in ways]
    assert own[0].tolist() == own[1].tolist()
    warm = rows[rows["temperature"] > 0]
    if not len(warm):
        return
    which = np.arange(len(warm)).repeat(2)
    tokens = np.random.default_rng(1).integers(-1, logits.shape[1], (len(which), 3))
    found, probs = zip(*(way.distributions(warm)(which, tokens) for way in ways), strict=True)
    assert np.array_equal(*(of.found[:, :2] for of in found))
    assert probs[0] == pytest.approx(probs[1], rel=1e-12, abs=1e-300)
    assert found[0].entropies() == pytest.approx(found[1].entropies(), abs=1e-9)
    every = np.arange(len(warm))
    edits = Edits(every, np.full(len(warm), 3), np.full(len(warm), 0.25))
    for uniform in (1e-10, 0.3, 1 - 1e-10):
        uniforms = np.full(len(warm), uniform)
        drawn = [way.draw(of, every, edits, uniforms).tolist() for way, of in zip(ways, found, strict=True)]
        assert drawn[0] == drawn[1]


PARAMS = st.lists(sampling_params(), min_size=1, max_size=4)


@settings(max_examples=60)
@given(PARAMS, st.integers(0, 2**32), st.sampled_from([4, 7, 8, 9, 100, 4096]), st.booleans())
def test_small_and_odd_vocabularies(params, entropy, vocab, coarse):
    compare(logits_of(entropy, len(params), vocab, coarse=coarse), params)


def params_of(count, seed=0):
    """Parameters for a number of rows, with all samplers in turns."""
    return [SamplingParams(seed=seed + i, **SAMPLERS[i % len(SAMPLERS)]) for i in range(count)]


@each(("spread", "coarse"), product([0.01, 1.0, 4.0, 20.0], [False, True]))
def test_wide_rows(spread, coarse):
    params = params_of(len(SAMPLERS))
    compare(logits_of(3, len(params), 151_936, spread=spread, coarse=coarse), params)


def test_banned_tokens_and_low_temperatures():
    logits = logits_of(4, len(SAMPLERS), 500)
    logits[:, 3:480] = -torch.inf
    compare(logits, params_of(len(SAMPLERS)))
    compare(logits, [SamplingParams(temperature=1e-30, top_p=0.9)] * len(logits))


def test_other_layouts_are_read_where_they_lie():
    wide = logits_of(5, 6, 800)
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=i) for i in range(3)]
    compare(wide[::2, :700], params)
    compare(wide.t()[:3], params)
    compare(wide[:3].to(torch.bfloat16), params)


@each("domain", Domain)
def test_draws_are_those_of_numpy(domain, monkeypatch):
    rng = np.random.default_rng(6)
    of = rng.integers(0, 2**63, 200, np.uint64), rng.integers(0, 2**31, 200), rng.integers(0, 200_000, 200)
    by_kernel = draws.uniforms(*of, domain)
    monkeypatch.setattr(host_kernels, "kernels", lambda: None)
    assert np.array_equal(by_kernel, draws.uniforms(*of, domain))


# (position, token) at which the hash of seed 7 is 0 and 2**32 - 1, found by inverting it.
EDGES = ((92_169, 128_360), (15_084, 69_171))


def compare_at_the_hashes_edges(built=None):
    """All else is banned: the token is chosen if its noise is finite."""
    for position, token in EDGES:
        logits = torch.full((1, 151_936), -torch.inf)
        logits[0, [token, 3]] = 0.0
        rows = make_rows([SamplingParams(temperature=1.0, seed=7)], [position])
        expected = TorchRows(logits).own_tokens(rows)()
        assert expected.tolist() == HostRows(on_host(logits), built or kernels()).own_tokens(rows)().tolist()
        uniforms = np.zeros(1)
        of = np.array([7], np.uint64), np.array([position]), np.array([token])
        (built or kernels()).specq_uniforms(1, *(host_rows._pointer(a) for a in of), 1, host_rows._pointer(uniforms))
        assert 0 < uniforms[0] < 1


def test_the_hashes_edges():
    compare_at_the_hashes_edges()
    hashes = [oracle.hash32(Domain.GUMBEL, 7, *edge) for edge in EDGES]
    assert hashes == [0, 2**32 - 1]


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------

MUTANTS = {
    "the limit is no limit": ("(LOG2 * (31 - log2) + MARGIN)", "(LOG2 * (30 - log2))"),
    "one key of two": ("    x += keys.key1;\n", ""),
    "the position left out": ("* 0x9E3779B97F4A7C15u) + position)", "* 0x9E3779B97F4A7C15u))"),
    "infinite noise": ("+ 2147483648.5) * 0x1p-32", "+ 2147483648.0) * 0x1p-32"),
    "top-p of one instead of the whole": ("row->top_p * total);\n    float", "row->top_p);\n    float"),
    "top-p without top-k's cut": ("total = sum_up_to(of, last);", "total = sum_up_to(of, ALL_KEYS);"),
    "one more than top-k": ("of.weights[i] : 1;\n        for", "of.weights[i] : 0.5;\n        for"),
    "the likeliest suffice": ("of = gather(work, INFINITY);", ";"),
    "min-p forgotten": ("fmaxf(-edge, row->log_min_p)", "-edge"),
    "edits forgotten": ("weights[edit_ids[e]] = edit_values[e] * found[n].mass;", ";"),
    "edits not scaled": ("edit_values[e] * found[n].mass", "edit_values[e]"),
    "the draw's cut forgotten": ("work->scaled[i] >= (float)found[n].bound ? weights[i] : 0", "weights[i]"),
    "a short series": ("for (int i = 0; i < 13; i++) y", "for (int i = 6; i < 13; i++) y"),
    "a NaN overlooked": ("any8(is_nan) ? NAN : top", "top"),
    "a NaN at the end overlooked": ("if (x[i] != x[i]) return NAN;", ""),
}


def everything(built=None):
    """All comparisons that planted bugs must fail."""
    for entropy in range(4):
        for spread, vocab in ((3.0, 900), (0.1, 5000), (3.0, 30)):
            compare(logits_of(entropy, 70, vocab, spread=spread), params_of(70, entropy * 99), built)
    compare_at_the_hashes_edges(built)
    for place in (2, 9):
        logits = torch.zeros(1, 10)
        logits[0, place] = torch.nan
        for sampler in SAMPLERS:
            with pytest.raises(EngineError):
                HostRows(on_host(logits), built or kernels()).own_tokens(make_rows([SamplingParams(**sampler)], [0]))


def test_the_kernels_are_no_mutants():
    everything()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, tmp_path, monkeypatch):
    built = mutated_kernels(tmp_path, monkeypatch, *MUTANTS[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        everything(built)
