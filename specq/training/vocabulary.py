"""The shared tokenizer: byte-level BPE of 4,096 entries in which every digit is its own token.

Both models of the pair load the same files, so they can exchange token ids directly.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specq.training.corpus import END_OF_TEXT, END_OF_TURN, PADDING, START_OF_TURN, read_documents

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, PADDING]

# Words with the space before them, single digits, runs of punctuation, line breaks, other white space.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(corpus: Path, limit: int | None) -> PreTrainedTokenizerFast:
    """Train the BPE on the corpus, at most `limit` records a shard."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in read_documents(corpus, limit)), trainer)
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the BPE its special tokens and chat template."""
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=[END_OF_TEXT, START_OF_TURN],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    tokenizer_of_both: PreTrainedTokenizerFast = wrapped
    return tokenizer_of_both


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [END_OF_TEXT, START_OF_TURN])
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer that `save_tokenizer` wrote."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that end an answer: <|im_end|> and <|endoftext|>."""
    return [token_id(tokenizer, name) for name in (END_OF_TURN, END_OF_TEXT)]


def token_id(tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    """Return the id of one token."""
    found = tokenizer.convert_tokens_to_ids(name)
    assert isinstance(found, int), "one name, one id"
    return found
