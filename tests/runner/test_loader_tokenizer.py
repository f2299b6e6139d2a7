from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_tokenizer import build_tokenizer
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import byte_tokenizer, gguf_tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox isn't 12345 years old; it'll be 7 in 2026!",
    "def add(a, b):\n    return a + b  # 3.14159\n\n\n    pass",
    "Zażółć gęślą jaźń — naïve café, 北京 and Ελλάδα, १२३",
    "  leading, trailing   and\ttabs\r\nnew lines  ",
]
SPECIALS = ["<|end|>", "<|user|>"]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*before: Any, use_regex: bool) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last])


def _split(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated")


# How the models' own tokenizer.json files cut text into words.
ORIGINALS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: _byte_level(_split(_WORDS % r"\p{N}{1,3}"), use_regex=False),
    "qwen2": lambda: _byte_level(_split(_WORDS % r"\p{N}"), use_regex=False),
    "qwen35": lambda: _byte_level(_split(PRETOKENIZE_REGEX), use_regex=False),
}


def _original(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ORIGINALS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _vocabulary(tokenizer: Tokenizer) -> list[str]:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    return [by_id[index] for index in range(len(by_id))]


def _write_bpe(path: Path, tokenizer: Tokenizer, pre: str, **flags: bool) -> GgufFile:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = _vocabulary(tokenizer)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIALS else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    _finish(writer)
    return GgufFile(path)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_bpe_encodes_like_the_original(pre: str, tmp_path: Path) -> None:
    original = _original(pre)
    found = build_tokenizer(_write_bpe(tmp_path / "t.gguf", original, pre, add_bos_token=False))
    texts = [*CORPUS, "x1234567y", "<|user|>hi<|end|>", "é vs é", "a\n\n b", "", "I'LL we're"]
    for text in texts:
        assert found.encode(text).ids == original.encode(text).ids, text
        ids = original.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )


def test_pre_tokenizers_differ_where_they_should(tmp_path: Path) -> None:
    original = _original("smollm")
    lengths = {}
    for pre in ("smollm", "gpt-2", "default", "llama3"):
        file = _write_bpe(tmp_path / f"{pre}.gguf", original, pre, add_bos_token=False)
        tokenizer = build_tokenizer(file)
        words = tokenizer.pre_tokenizer.pre_tokenize_str("n 12345")
        lengths[pre] = [word for word, _ in words]
    assert lengths["smollm"] == ["n", "Ġ", "1", "2", "3", "4", "5"]
    assert lengths["gpt-2"] == ["n", "Ġ12345"]
    assert lengths["default"] == ["n", "Ġ", "123", "45"]
    assert lengths["llama3"] == ["n", "Ġ", "123", "45"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smaug-bpe", "aBC|'LL| x|123|45| a|/*|b|,\n\n| c| 日本|4"),
        ("gpt-4o", "a|BC'LL| x|123|45| a|/*|b|,\n\n| c| 日本|4"),
        ("qwen35", "aBC|'LL| x|1|2| नमस्ते|,\n\n| c| 日本|4"),
        ("seed-coder", "aBC|'LL| x|1|2|3|4|5| a|/*|b|,|\n\n| c| 日本|4"),
        ("deepseek-v3", "aBC|'LL| x|123|45| a|/*|b|,\n\n| c| |日本|4"),
        ("hunyuan-dense", "aBC|'LL| x|123|45| a|/*|b|,\n\n| c| |日本|4"),
        ("deepseek-llm", "aBC|'|LL| x|12345| a|/*|b|,|\n|\n| c| |日本|4|éΩﬀ|ٱ"),
        ("refact", "aBC|'|LL| x|1|2|3|4|5| a|/*|b|,|\n\n| c| 日本|4"),
        ("exaone4", "aBC|'|LL| x|12345| a|/*|b|,|\n\n| c| 日本|4"),
    ],
)
def test_each_pre_tokenizer_cuts_words_as_published(pre: str, words: str, tmp_path: Path) -> None:
    file = _write_bpe(tmp_path / "t.gguf", _original("gpt-2"), pre, add_bos_token=False)
    text = words.replace("|", "")
    cut = build_tokenizer(file).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words.split("|")


def test_bos_is_added_as_the_file_or_the_pre_tokenizer_says(tmp_path: Path) -> None:
    original = _original("gpt-2")
    starts = {}
    for name, pre, flags in [
        ("silent gpt-2", "gpt-2", {}),
        ("gpt-2 with", "gpt-2", {"add_bos_token": True}),
        ("silent llama-bpe", "llama-bpe", {}),
        ("llama-bpe without", "llama-bpe", {"add_bos_token": False}),
    ]:
        file = _write_bpe(tmp_path / f"{name}.gguf", original, pre, **flags)
        starts[name] = build_tokenizer(file).encode("fox").ids[0] == 1
    assert starts == {
        "silent gpt-2": False,
        "gpt-2 with": True,
        "silent llama-bpe": True,
        "llama-bpe without": False,
    }


def test_chat_template_and_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(_write_bpe(tmp_path / "t.gguf", _original("smollm"), "smollm"))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], return_dict=False)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "<|user|>fox"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "fox"


def test_chat_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(jinja2.exceptions.SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    tokenizer.chat_template = "{{ messages.clear() }}"
    with pytest.raises(jinja2.exceptions.SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("model", "bert", "'bert' is not supported"), ("pre", "viking", "'viking' is not supported")],
)
def test_unknown_tokenizers_are_refused(key: str, value: str, message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    texts = {"model": "gpt2", "pre": "gpt-2"} | {key: value}
    for name, text in texts.items():
        writer.add_string(f"tokenizer.ggml.{name}", text)
    writer.add_token_list(["a"])
    _finish(writer)
    with pytest.raises(ModelLoadError, match=message):
        build_tokenizer(GgufFile(tmp_path / "t.gguf"))


# SentencePiece: pieces and their scores; better (greater) scores are joined first.
PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "ca", "cab", "b▁", "aa", "▁▁"]
SCORES = [-9.0, -9.5, -9.6, -9.7, -3.0, -2.0, -4.0, -8.0, -5.0, -1.5, -2.5, -6.0, -7.0, -6.5]


def _write_spm(path: Path, **flags: bool) -> GgufFile:
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", *byte_pieces, *PIECES])
    writer.add_token_scores([0.0, 0.0, *[0.0] * 256, *SCORES])
    writer.add_token_types([UNKNOWN, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    _finish(writer)
    return GgufFile(path)


def _best_join_first(text: str) -> list[str]:
    """SentencePiece's BPE (Kudo and Richardson 2018): always join the neighbours whose piece scores
    best, the leftmost of equals."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    pieces = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        known = [(-scores[pair], place) for place, pair in enumerate(pairs) if pair in scores]
        if not known:
            return pieces
        place = min(known)[1]
        pieces[place : place + 2] = [pairs[place]]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "t.gguf"
    return build_tokenizer(_write_spm(path, add_bos_token=False))


@given(text=st.text("abc ", min_size=1, max_size=24))
def test_sentencepiece_joins_by_score(sentencepiece: Tokenizer, text: str) -> None:
    found = sentencepiece.encode(text)
    assert found.tokens == _best_join_first("▁" + text.replace(" ", "▁"))
    assert sentencepiece.decode(found.ids) == text


def test_sentencepiece_spells_the_unknown_in_bytes(sentencepiece: Tokenizer) -> None:
    found = sentencepiece.encode("aé")
    assert found.tokens == ["▁a", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(found.ids) == "aé"


def test_sentencepiece_flags(tmp_path: Path) -> None:
    plain = build_tokenizer(_write_spm(tmp_path / "plain.gguf"))
    assert plain.encode("ab").tokens == ["<s>", "▁ab"]
    bare = build_tokenizer(_write_spm(tmp_path / "bare.gguf", add_space_prefix=False))
    assert bare.encode("ab").tokens == ["<s>", "ab"]
    assert bare.decode(bare.encode(" ab").ids) == " ab"


def test_directories_use_their_own_tokenizer(small_models: dict[str, Path]) -> None:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    tokenizer = load_tokenizer(source)
    text = "Hello, 123!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "[user] hi\n[assistant] "


def test_a_file_replaces_the_chat_template(small_models: dict[str, Path], tmp_path: Path) -> None:
    source = resolve_model(ModelConfig(model=str(small_models["llama"])))
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}?")
    tokenizer = load_tokenizer(source, str(tmp_path / "chat.jinja"))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi?"
    with pytest.raises(ModelLoadError, match="cannot read the chat template"):
        load_tokenizer(source, str(tmp_path / "missing.jinja"))


def test_template_may_stand_in_a_file_of_its_own(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    """As in older multimodal checkpoints; one of tokenizer_config.json goes before it."""
    folder = Path(shutil.copytree(small_models["llama"], tmp_path / "small"))
    template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    byte_tokenizer(256).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    source = resolve_model(ModelConfig(model=str(folder)))
    assert load_tokenizer(source).chat_template == template
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "other"}))
    assert load_tokenizer(source).chat_template == "other"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gptneox"])
def test_a_directory_without_tokenizer_is_named(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """transformers gives some families a tokenizer of special tokens alone."""
    (tmp_path / "config.json").write_text((small_models[family] / "config.json").read_text())
    added = {str(300 + i): {"content": f"<added {i}>", "special": True} for i in range(22)}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": added}))
    source = resolve_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelLoadError, match="has no tokenizer that can be read"):
        load_tokenizer(source)


@given(text=st.text(max_size=40))
def test_bytes_stand_in_for_a_missing_tokenizer(text: str) -> None:
    tokenizer = _BYTES
    ids = tokenizer.encode(text)
    assert ids == [] or max(ids) < 256
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_token_of_a_shape_shows_as_text() -> None:
    assert _BYTES.decode([300, 256]) == " 300 256"


_BYTES = byte_tokenizer(320)
