"""The end tokens that a GGUF file names: the ones that llama.cpp prints as EOG tokens when it loads the file."""

from __future__ import annotations

from pathlib import Path

from specq.checkpoints import GgufFile, gguf_ends
from specq.testing.checkpoints_gguf import CONTROL, NORMAL

USER_DEFINED = 4
# Vocabularies in the forms of public models (control tokens only), what their metadata name, and the tokens that end a
# text.
MODELS: dict[str, tuple[list[str], dict[str, int], set[str]]] = {
    # As llama.cpp logs it of SmolLM2: "EOG token = 0 '<|endoftext|>'", 2 '<|im_end|>', 4 '<reponame>'.
    "smollm2": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"],
        {"bos": 1, "eos": 2, "padding": 2},
        {"<|endoftext|>", "<|im_end|>", "<reponame>"},
    ),
    # Qwen2.5: 151643 '<|endoftext|>', 151645 '<|im_end|>', 151662 '<|fim_pad|>', 151663 '<|repo_name|>', 151664
    # '<|file_sep|>'.
    "qwen2.5": (
        [
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
            *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|vision_pad|>"),
        ],
        {"bos": 0, "eos": 2},
        {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
    ),
    # Llama 3.1: 128001 '<|end_of_text|>', 128008 '<|eom_id|>', 128009 '<|eot_id|>'.
    "llama 3.1": (
        [
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
            "<|eot_id|>",
        ],
        {"bos": 0, "eos": 5},
        {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    ),
    "only metadata": (["<a>", "<b>", "<c>", "<d>"], {"eos": 0, "eot": 1, "eom": 2}, {"<a>", "<b>", "<c>"}),
    "FIM by metadata": (["<a>", "<b>", "<PAD>"], {"fim_pad": 0, "fim_rep": 1}, {"<a>", "<b>"}),
    "a fine-tune with a base model's end": (["<s>", "</s>", "<|im_end|>"], {"eos": 1}, {"</s>", "<|im_end|>"}),
    "harmony": (
        ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|endoftext|>"],
        {"eos": 0},
        {"<|return|>", "<|call|>", "<|endoftext|>"},
    ),
    "gemma 4": (["<eos>", "<turn|>", "<|tool_response>", "</s>"], {"eos": 0}, {"<eos>", "<turn|>", "<|tool_response>"}),
    "phi": (["<|end|>", "<|user|>", "<|endoftext|>"], {"eos": 2}, {"<|end|>", "<|endoftext|>"}),
    "none": (["<start>", "<stop>"], {}, set()),
    "an id of no token": (["<a>"], {"eos": 7, "eot": 0}, {"<a>"}),
}


def file_of(tokens: list[str], kinds: list[int], named: dict[str, int]) -> GgufFile:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return GgufFile(Path("a.gguf"), metadata | {f"tokenizer.ggml.{role}_token_id": i for role, i in named.items()}, {})


def test_the_ends_are_those_of_llama_cpp() -> None:
    for name, (tokens, named, expected) in MODELS.items():
        words = ["hello", "<EOT>", "</s>"]  # ordinary words, which may be spelled so
        file = file_of([*tokens, *words], [CONTROL] * len(tokens) + [NORMAL] * len(words), named)
        found = gguf_ends(file)
        assert (name, {file.metadata["tokenizer.ggml.tokens"][i] for i in found}) == (name, expected)
        of_metadata = {i for role, i in named.items() if role != "bos"}
        assert {*list(found)[:1]} <= of_metadata, "those of the metadata come first"


def test_each_end_says_what_names_it() -> None:
    """An added token that no converter called control ends a text, too."""
    found = gguf_ends(file_of(["x", "<|im_end|>", "<y>"], [NORMAL, USER_DEFINED, CONTROL], {"eom": 2}))
    assert found == {2: "tokenizer.ggml.eom_token_id", 1: "a control token called <|im_end|>"}
