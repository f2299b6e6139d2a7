"""A tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type


def _ranges(listed: str) -> str:
    """Of hexadecimal code points, the inside of a class of characters."""
    return "".join("-".join(chr(int(end, 16)) for end in one.split("-")) for one in listed.split())


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Marks belong to the words that they are in.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALLS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters that have a case, of some scripts, as DeepSeek's tokenizers list them; in hexadecimal.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_ranges(_CASED)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)

_LLAMA3 = _WORDS.replace("NUMBERS", r"\p{N}{1,3}")
_STARCODER = (r"\p{N}", _GPT2)

# tokenizer.ggml.pre -> the regular expressions that cut text into words, applied in turn.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": _STARCODER,
    "llama-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_WORDS.replace("NUMBERS", r"\p{N}"),),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "seed-coder": (_SEED,),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
}
_SAME_AS = {
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("phi-2", "olmo", "mpt", "exaone4"), "gpt-2"),
    **dict.fromkeys(("smaug-bpe", "glm4", "chatglm-bpe"), "dbrx"),
    **dict.fromkeys(("llama4", "minimax-m2"), "gpt-4o"),
    "hunyuan-dense": "deepseek-v3",
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), "qwen2"),
}
# Text is normalised (NFC) before it is cut.
_NORMALISED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
# These look up whole words before merging, and add BOS by default.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "tekken"})


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of `file`: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises ModelLoadError for other models, and for an unknown pre-tokenizer: a guess would tokenise
    slightly wrong without an error.
    """
    kind = file.require("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelLoadError(
            f"{file.path}: tokenizer model {kind!r} is not supported; known: {', '.join(_BUILDERS)}"
        )
    tokenizer = _BUILDERS[kind](file)
    _add_marked_tokens(tokenizer, file)
    if adds_bos(file):
        _start_with_bos(tokenizer, file)
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    sentencepiece = file.get("tokenizer.ggml.model") == "llama"
    default = sentencepiece or _pre_name(file) in _WHOLE_WORDS_FIRST
    return bool(file.get("tokenizer.ggml.add_bos_token", default))


def token_text(file: GgufFile, key: str) -> str | None:
    """The text of the token `tokenizer.ggml.<key>_token_id`."""
    index = file.get(f"tokenizer.ggml.{key}_token_id")
    tokens = file.require("tokenizer.ggml.tokens")
    return tokens[index] if index is not None and index < len(tokens) else None


def _byte_level_bpe(file: GgufFile) -> Tokenizer:
    name = _pre_name(file)
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted([*_PRE_TOKENIZERS, *_SAME_AS]))
        raise ModelLoadError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; known: {known}. Use the "
            "model's safetensors directory instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    tokenizer = _bpe(file, merges, ignore_merges=name in _WHOLE_WORDS_FIRST)
    if str(file.get("tokenizer.ggml.pre")) in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(regex), "isolated") for regex in _PRE_TOKENIZERS[name]]
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GgufFile) -> Tokenizer:
    tokens = file.require("tokenizer.ggml.tokens")
    scores = file.require("tokenizer.ggml.scores")
    tokenizer = _bpe(
        file,
        _merges_by_score(tokens, scores),
        unk_token=token_text(file, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if file.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


_BUILDERS: dict[str, Callable[[GgufFile], Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def _bpe(file: GgufFile, merges: list[Any], **options: Any) -> Tokenizer:
    tokens = file.require("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:
        raise ModelLoadError(f"{file.path}: its tokenizer is broken: {error}") from error


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined token has the best score. As BPE merges: all
    splits of a token into two known tokens, best tokens first."""
    index = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = index.get(token[:cut]), index.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _pre_name(file: GgufFile) -> str:
    name = str(file.get("tokenizer.ggml.pre", "default"))
    return _SAME_AS.get(name, name)


def _add_marked_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Control and user-defined tokens are matched before text is split into words."""
    kinds = file.get("tokenizer.ggml.token_type", [])
    named = zip(file.require("tokenizer.ggml.tokens"), kinds, strict=False)
    marked = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=marked[kind], normalized=False)
            for token, kind in named
            if kind in marked
        ]
    )


def _start_with_bos(tokenizer: Tokenizer, file: GgufFile) -> None:
    bos = token_text(file, "bos")
    if bos is None:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
