"""A byte-level BPE tokenizer with a chat template, small enough to be made in each test process."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from text.tokenizer import Tokenizer as RouterTokenizer
from text.tokenizer import load_tokenizer

EOS = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the assistant cannot begin') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "system user assistant hello world, how are you today? I am fine, thank you.",
    "naïve café über straße 東京 日本語 한국어 😀 👩‍👩‍👧 é",
)


@functools.cache
def tokenizer_files() -> dict[str, bytes]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": {"content": "<|im_start|>"}}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


def endless_tokenizer_files() -> dict[str, bytes]:
    """The same without a token that ends answers: a random model would draw it."""
    files = tokenizer_files()
    config = {key: value for key, value in json.loads(files["tokenizer_config.json"]).items() if key != "eos_token"}
    return {**files, "tokenizer_config.json": json.dumps(config).encode()}


@functools.cache
def tiny_tokenizer() -> RouterTokenizer:
    return load_tokenizer(tokenizer_files())


def vocab_size() -> int:
    return int(tiny_tokenizer().rust.get_vocab_size())


def eos_id() -> int:
    token_id = tiny_tokenizer().rust.token_to_id(EOS)
    assert token_id is not None
    return int(token_id)


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().rust.encode(text, add_special_tokens=False).ids)


def byte_ids(text: str) -> list[int]:
    """One token for each UTF-8 byte: characters split as badly as can be."""
    tokenizer = tiny_tokenizer()
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(vocab_size()))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]
