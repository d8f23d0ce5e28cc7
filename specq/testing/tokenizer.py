"""Tiny tokenizers, built on demand, as the files that a verifier would serve: byte-level and SentencePiece."""

import json
import string
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SAMPLE = (
    "def add(a, b):\n    return a + b\n",
    "Janet sells 16 - 3 - 4 = 9 duck eggs a day. She makes 9 * 2 = 18 dollars.\n",
    "naïve café 中文 текст 🙂🙃 \u00e9\u0301",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def tokenizer_json() -> str:
    """Train about 350 byte-level entries. Ids 0 to 2 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE * 4, trainer)
    return str(tokenizer.to_str())


def sentencepiece_files() -> dict[str, str]:
    """Return the files of a SentencePiece tokenizer.

    Spaces are letters, with one before each text. `<s>` precedes the text, and single bytes have tokens. Few words are
    whole tokens.
    """
    words = ["\u2581", "\u2581a", "\u2581the", "re", "turn", "\u2581re", "\u2581return", "eg", "gs", "\u2581eggs"]
    letters = sorted(set("".join(SAMPLE).replace(" ", "") + string.ascii_letters + string.digits) - set("\n🙂中"))
    pieces = ["<unk>", "<s>", "</s>", *words, *letters, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return {"tokenizer.json": str(tokenizer.to_str()), "tokenizer_config.json": json.dumps(config)}


def tokenizer_files() -> dict[str, str]:
    """Return the files that `load_tokenizer_files` would read from such a checkpoint."""
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    return {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)}
