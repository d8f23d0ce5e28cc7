"""transformers as a rival: it must return the model's text, and stop at the given end."""

from dataclasses import replace

import pytest

from bench.rivals.transformers import Rivals, Transformers
from bench.scenario import Settings
from specq.samples import Prompt
from specq.testing.checkpoints import load_reference, make_checkpoint, reference_text

SETTINGS = Settings(datasets=("x",), output_len=12, k=3, ignore_eos=True)
PROMPTS = [Prompt("x", str(i), tuple(range(5 + i, 15 + i))) for i in range(3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random target, and a draft of another shape."""
    folder = tmp_path_factory.mktemp("pair")
    return make_checkpoint("llama", folder / "target"), make_checkpoint("qwen2", folder / "draft")


@pytest.fixture(scope="module")
def rivals(pair):
    return Rivals(str(pair[0]), str(pair[1]))


@pytest.mark.parametrize("assisted", [False, True])
def test_greedy_text(pair, rivals, assisted):
    """With and without assistant: the model's own text, and a first token before the last."""
    reference = load_reference(pair[0])
    completions = Transformers(rivals, "rival", assisted=assisted).run(PROMPTS, SETTINGS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == reference_text(reference, list(prompt.token_ids), 12)
        assert completion.first_token_ms > 0
        assert 1 <= completion.stats["rounds"] <= 12
    assert assisted or {completion.stats["rounds"] for completion in completions} == {12}


def test_end_of_text(rivals):
    """By default, the text ends with the model's end-of-text token."""
    (free,) = Transformers(rivals, "rival", assisted=False).run(PROMPTS[:1], SETTINGS)
    ending = free.token_ids[5]
    rivals.target.generation_config.eos_token_id = ending
    (ended,) = Transformers(rivals, "rival", assisted=False).run(PROMPTS[:1], replace(SETTINGS, ignore_eos=False))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(ending) + 1]


def test_sampling_has_a_seed(rivals):
    """With a temperature the same seed gives the same text, another one another."""
    rival = Transformers(rivals, "rival", assisted=False)
    texts = [rival.run(PROMPTS[:1], replace(SETTINGS, temperature=1.5, seed=seed))[0].token_ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logit_gap(pair, rivals):
    """The gap of the best token to another is what the logits say; to itself it is none."""
    reference = load_reference(pair[0])
    best = reference_text(reference, [5, 6, 7], 1)[0]
    other = (best + 1) % 99
    assert rivals.logit_gap([5, 6, 7], best, best) == 0
    assert rivals.logit_gap([5, 6, 7], best, other) == rivals.logit_gap([5, 6, 7], other, best) > 0
