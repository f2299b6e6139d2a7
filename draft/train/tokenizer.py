"""A byte-level BPE tokenizer with the ChatML template, for models trained from nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END)
NUM_BYTES = 256

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> Any:
    """A transformers PreTrainedTokenizerFast of exactly `vocab_size` ids; answers end with
    <|im_end|>. Where the texts give no more merges, the ids at the end are <|unused...|>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    unused = [AddedToken(f"<|unused{i}|>", special=True) for i in range(missing)]
    tokenizer.add_special_tokens(unused)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        bos_token=None,
        model_max_length=max_length,
        chat_template=CHATML,
    )
