"""Loads tokenizers as transformers' PreTrainedTokenizerFast.

Chat templates come with the model and are untrusted: transformers renders them in Jinja's
immutable sandbox.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_tokenizer import build_tokenizer, token_text
from specengine.runner.loader.hf_directory import read_json
from specengine.runner.loader.model_source import ModelSource


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Any:
    """The model's tokenizer, a transformers PreTrainedTokenizerFast.

    `chat_template` is the path of a Jinja file that replaces the model's own template. A built-in
    shape gets a tokenizer of plain bytes.
    """
    if source.gguf_file is not None:
        tokenizer = gguf_tokenizer(GgufFile(source.gguf_file))
    elif source.directory is not None:
        tokenizer = _directory_tokenizer(source.directory)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _template_beside(source.directory)
    else:
        tokenizer = byte_tokenizer(source.hf_config.vocab_size)
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template))
    return tokenizer


def gguf_tokenizer(file: GgufFile) -> Any:
    """The tokenizer inside a GGUF file, with its chat template."""
    return _fast_tokenizer(
        build_tokenizer(file),
        chat_template=file.get("tokenizer.chat_template"),
        model_max_length=file.require("{arch}.context_length"),
        bos_token=token_text(file, "bos"),
        eos_token=token_text(file, "eos"),
        unk_token=token_text(file, "unknown"),
        pad_token=token_text(file, "padding"),
    )


def byte_tokenizer(vocab_size: int) -> Any:
    """A token for every byte, ids 0 to 255; the others decode to " <id>". For random weights: it
    encodes any text, and decodes every token to some text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet[:vocab_size])}
    vocabulary |= {f"Ġ{index}": index for index in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast_tokenizer(tokenizer, chat_template=_PLAIN_TEMPLATE)


_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def _fast_tokenizer(tokenizer: Tokenizer, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    given = {name: value for name, value in options.items() if value is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **given
    )


# Without a vocabulary's file, transformers gives some families a tokenizer of its special tokens.
_FEWEST_TOKENS = 16


def _directory_tokenizer(directory: Path) -> Any:
    """Prefers tokenizer.json, which the model's own tokenizer class might rebuild differently."""
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer  # which takes seconds to import

        found = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if found.vocab_size < _FEWEST_TOKENS:
            raise ValueError("no file has its vocabulary")
        return found
    except Exception as error:
        raise ModelLoadError(
            f"{directory} has no tokenizer that can be read ({error}); it needs tokenizer.json and "
            "tokenizer_config.json"
        ) from error


def _template_beside(directory: Path) -> str | None:
    """Of older multimodal checkpoints; others have it in a file that transformers reads."""
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    found = read_json(path).get("chat_template")
    if found is not None and not isinstance(found, str):
        raise ModelLoadError(f"{path}: chat_template is no text; name a file by --chat-template")
    return found


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read the chat template {path}: {error}") from error
