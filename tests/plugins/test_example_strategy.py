"""A strategy of another package is judged beside ours, and keeps what it promises."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specq.testing import oracle
from specq.testing.random_steps import packed_logits, sampling_params, split, steps
from specq.verification.judge import judge


@pytest.mark.usefixtures("plugin")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(steps(params=st.sampled_from(["cautious", "greedy"]).flatmap(sampling_params)), max_size=4),
    st.integers(0, 2**32),
)
def test_it_says_what_deterministic_says_one_draft_at_a_time(batch, entropy):
    logits = packed_logits(batch, entropy)
    found = [(j.path, j.token_ids.tolist()) for j in judge(batch, logits)]
    for (step, rows), (path, tokens) in zip(split(batch, logits), found, strict=True):
        if step.params.strategy == "cautious":
            expected = oracle.deterministic(step, rows)
            assert (path, tokens) == (tuple(expected[0][:1]), expected[1][:2])
