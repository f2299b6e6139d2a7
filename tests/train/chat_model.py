"""A tiny random model whose every token is text that a person could have typed."""

from __future__ import annotations

from pathlib import Path

import torch

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> int:
    """Printable ASCII and the new line, a token each, and merges of letters with a space -> the
    size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = [("Ġ", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    names = SPECIALS + letters + ["".join(merge) for merge in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=SPECIALS,
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return len(vocabulary)


def save_chat_model(folder: Path, seed: int = 0) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=save_tokenizer(folder),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval().float()
    with torch.no_grad():  # endings are likelier than one in a hundred
        model.lm_head.weight[2] *= 1.5
    model.save_pretrained(folder)
