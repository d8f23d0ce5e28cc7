"""`specq train pair` runs all its stages, two steps each, on a corpus of a few lines."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from specq.cli import main
from specq.training.decoding import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TINY_RUN = [
    *("--device=cpu", "--steps=2", "--limit=12", "--row-length=64", "--batch-tokens=128"),
    *("--num-rollouts=6", "--rollout-tokens=6", "--bench-prompts=2", "--bench-tokens=6"),
]


def run(places: dict[str, Path], stage: str) -> Result:
    """Run a stage, or all of them."""
    options = [f"--{name}={folder}" for name, folder in places.items()]
    return CliRunner().invoke(main, ["train", "pair", *options, *TINY_RUN, stage], catch_exceptions=False)


def test_losses_are_finite(output: str) -> None:
    """Both training loops end with a finite loss."""
    finals = [float(line.split()[-1]) for line in output.splitlines() if line.startswith(("target loss", "draft loss"))]
    assert len(finals) == 2
    assert all(math.isfinite(loss) for loss in finals)


@pytest.mark.usefixtures("output")
def test_exports_a_loadable_pair(places: dict[str, Path]) -> None:
    """The exported directories load, are of the promised sizes and share one tokenizer."""
    pair = {name: AutoModelForCausalLM.from_pretrained(places["out"] / name) for name in ("target", "draft")}
    tokenizers = [AutoTokenizer.from_pretrained(places["out"] / name) for name in pair]
    sizes = {name: (places["out"] / name / "model.safetensors").stat().st_size for name in pair}
    assert sizes["target"] <= 20_000_000
    assert sizes["draft"] <= 3_000_000
    assert all(model.config.tie_word_embeddings and model.config.vocab_size == 4096 for model in pair.values())
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    turn = [{"role": "user", "content": "1234"}]
    for tokenizer in tokenizers:
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        assert text == "<|im_start|>user\n1234<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizers[0].tokenize("1234") == ["1", "2", "3", "4"]
    ends = tokenizers[0].convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert set(ends) == set(pair["target"].generation_config.eos_token_id)


@pytest.mark.usefixtures("output")
def test_reports_acceptance(places: dict[str, Path]) -> None:
    """The report counts between one and six tokens a round for the benchmark it was given."""
    report = json.loads((places["work"] / "results-draft-2.json").read_text(encoding="utf-8"))
    figures = report["acceptance"]["figs"]
    assert figures["num_prompts"] == 2
    for way in ("greedy", "sampled_0.8"):
        assert 1 <= figures[way]["mean_accepted_length"] <= 6


@pytest.mark.usefixtures("output")
def test_cached_decoding_matches_transformers(places: dict[str, Path]) -> None:
    """Greedy decoding over the static cache, prompts of unequal length, equals `generate` of transformers."""
    model = AutoModelForCausalLM.from_pretrained(places["out"] / "target").float()
    prompts = [[5, 9, 70, 8], [300, 6, 7, 80, 90, 44, 12]]
    answers = generate(model, prompts, num_new=5, temperatures=[0.0, 0.0], stops=[0], pad_id=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        inputs = model.dummy_inputs["input_ids"].new_tensor([prompt])
        expected = model.generate(inputs, max_new_tokens=5, eos_token_id=0, pad_token_id=3, do_sample=False)
        assert expected[0, len(prompt) :].tolist()[: len(answer)] == answer
