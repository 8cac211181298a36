"""Tiny random models with a real tokenizer, built in a second as ordinary Hugging Face folders."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _bpe(vocab: int) -> str:
    """Return the JSON of a byte-level BPE trained on the text that Python ships in `pydoc_data.topics`."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(topics.values())[:30], trainer)
    return tokenizer.to_str()


def build_tokenizer(folder: Path, *, vocab: int = 1024) -> None:
    """Write a tokenizer of `vocab` tokens, with a ChatML template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe(vocab)),
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def save_model(model: Any, folder: Path, vocab: int = 1024) -> Path:
    """Write a model, with a tokenizer of `vocab` tokens, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 3
    model.save_pretrained(folder)
    build_tokenizer(folder, vocab=vocab)
    return folder


def build_tiny_llama(folder: Path, seed: int = 0, vocab: int = 1024, **config: Any) -> Path:
    """Write a random Llama (hidden 64, 2 layers, 152 k parameters by default) in fp32 and return `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    torch.manual_seed(seed)
    return save_model(LlamaForCausalLM(LlamaConfig(**(values | config))), folder, vocab)
