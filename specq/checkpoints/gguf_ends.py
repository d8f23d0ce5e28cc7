"""The tokens that end a text, by all that a GGUF file says: what llama.cpp calls its end-of-generation tokens.

    by metadata   eos, eot and eom; the padding and the separators of fill-in-the-middle (FIM)
    by name       tokens that are called as the ends of known models, since most files name only one end

The names are those of llama.cpp (`special_eog_ids` in src/llama-vocab.cpp). Two differences are intended. A token must
be of the kind control or user-defined: `</s>` may be an ordinary word, which llama.cpp takes for an end all the same.
And what the metadata name stays an end: llama.cpp drops `<|end|>` and `</s>` in two families of models even then.
"""

from __future__ import annotations

from specq.checkpoints.gguf_file import GgufFile

METADATA = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # tokenizer.ggml.KEY_token_id
_NAMES = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *(
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
    ),
    *("<eos>", "<turn|>", "<|tool_response>"),
)
_FIM_NAMES = {  # looked for where the metadata name none
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A name that ends no text where all of one of these sets are ends, too: it separates parts of an answer there.
_SEPARATES: dict[str, tuple[set[str], ...]] = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"}),
    "</s>": ({"<|tool_response>"},),
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def gguf_ends(file: GgufFile) -> dict[int, str]:
    """Return the ids of the tokens that end a text, those of the metadata first, each with what says so."""
    ends = dict[int, str]()
    for role in METADATA:
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(_tokens(file)):
            ends.setdefault(token_id, f"tokenizer.ggml.{role}_token_id")
    for token_id, name in _named(file):
        ends.setdefault(token_id, f"a control token called {name}")
    return ends


def _tokens(file: GgufFile) -> list[str]:
    found = file.metadata.get("tokenizer.ggml.tokens")
    return found if isinstance(found, list) else []


def _named(file: GgufFile) -> list[tuple[int, str]]:
    """Return the ids and names of the tokens that are ends by their names."""
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    pairs = zip(range(len(_tokens(file))), _tokens(file), kinds if isinstance(kinds, list) else [], strict=False)
    marks = [(i, name) for i, name, kind in pairs if kind in (_CONTROL, _USER_DEFINED)]
    names = {name for _, name in marks}
    unsaid = [role for role in _FIM_NAMES if f"tokenizer.ggml.{role}_token_id" not in file.metadata]
    fim = {name for role in unsaid for name in _FIM_NAMES[role]}
    apart = {name for name, sets in _SEPARATES.items() if any(needed <= names for needed in sets)}
    return [(i, name) for i, name in marks if name in fim.union(_NAMES) - apart]
