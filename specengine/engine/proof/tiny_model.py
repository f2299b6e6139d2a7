"""A small random Llama on disk, for proofs that are given no model."""

from __future__ import annotations

from pathlib import Path

import torch

_VOCAB = 300
_SPECIALS = ["<eos>", "<bos>"]


def save_tiny_model(folder: Path, seed: int) -> None:
    """Weights as transformers saves them, and a tokenizer with a token a byte. Sharper than usual,
    so that greedy text is no tie between all tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.12,
        eos_token_id=0,
        bos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    disable_progress_bar()
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<unused{i}>" for i in range(_VOCAB - len(names))]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eos, bos = _SPECIALS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.save_pretrained(folder)
