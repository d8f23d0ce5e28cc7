"""A tiny byte-level tokenizer, trained on the spot, as files that a verifier would serve."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    """Train about 350 byte-level entries; ids 0 to 2 are special."""
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


def tokenizer_files() -> dict[str, str]:
    """Return what `load_tokenizer_files` would read of such a checkpoint."""
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    return {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)}
