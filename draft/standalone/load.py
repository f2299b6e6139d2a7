"""Loading a smaller model of the target's vocabulary."""

from __future__ import annotations

from typing import Any, cast

import torch

from specengine.core.errors import ModelLoadError
from specengine.core.model import DecoderModel
from specengine.draft.loaded import DraftTarget, LoadedDraft
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer
from specengine.runner.memory.kept_state import state_shape_of
from specengine.runner.memory.kv_shape import kv_shape_of

_SAMPLE = "Hello, world! 12345 = x**2;\n\tdef f(a): return 'ünïcode' 你好\n"


def load_standalone(target: DraftTarget) -> LoadedDraft:
    """Raises ConfigError or ModelLoadError where the draft is missing or does not fit."""
    model_config = target.loaded.config.model
    source = resolve_model(target.draft_model_config())
    _check_fit(source, target)
    model = load_model(
        source,
        target.find_model_class,
        target.dtype,
        target.loaded.device,
        model_config.quantization,
        model_config.random_seed,
        model_config.context_length,
    )
    _keep_common(cast(Any, model), _num_common(source, target), target)
    _check_state(model, source)
    shape = kv_shape_of([model], target.dtype)
    return LoadedDraft((cast(DecoderModel, model),), shape)


def _check_state(model: object, draft: ModelSource) -> None:
    if state_shape_of(model) is not None:
        raise ModelLoadError(
            f"the draft {draft.name} keeps recurrent state, which STANDALONE does not roll back; "
            "take a draft that attends in every layer, or --speculative-algorithm MTP or EAGLE3"
        )


def _check_fit(draft: ModelSource, target: DraftTarget) -> None:
    if draft.context_length < target.context_length:
        raise ModelLoadError(
            f"the draft {draft.name} has {draft.context_length} positions (max_position_embeddings)"
            f" and requests can have {target.context_length}; add --context-length "
            f"{draft.context_length}, or take a draft with more"
        )
    _check_tokenizers(load_tokenizer(draft), target.loaded.tokenizer, draft.name)


def _num_common(draft: ModelSource, target: DraftTarget) -> int:
    """Tokens that both say, from 0 on. Models of one family pad their vocabularies to different
    sizes: rows past the tokenizer's last token are of no token."""
    sizes = int(draft.hf_config.vocab_size), target.loaded.model.vocab_size
    if sizes[0] == sizes[1]:
        return sizes[1]
    last: int = max(target.loaded.tokenizer.get_vocab().values())
    return min(*sizes, last + 1)


def _keep_common(model: Any, count: int, target: DraftTarget) -> None:
    """Let a draft say the first `count` tokens alone, and read any token of the target's."""
    most = target.loaded.model.vocab_size
    if model.vocab_size < most:
        model.embed.has_all = False
    if model.vocab_size == count:
        if count < most:
            model.target_ids = torch.arange(count, device=model.lm_head.device)
        return
    ids = torch.arange(count, device=model.lm_head.device)
    model.head = model.head.for_draft(None, ids)
    model.vocab_size, model.target_ids = count, ids


def _check_tokenizers(draft: Any, target: Any, name: str) -> None:
    """Vocabularies of one size may still be different ones."""
    for token in target.all_special_tokens:
        ours, theirs = (one.convert_tokens_to_ids(token) for one in (draft, target))
        if ours != theirs:
            raise ModelLoadError(
                f"the special token {token} is {ours} in the tokenizer of the draft {name} and "
                f"{theirs} in the target's; STANDALONE needs a draft of the target's own vocabulary"
            )
    if draft(_SAMPLE).input_ids != target(_SAMPLE).input_ids:
        raise ModelLoadError(
            f"the tokenizer of the draft {name} cuts text differently from the target's; "
            "STANDALONE needs a draft of the target's own vocabulary"
        )
    theirs = target.get_vocab()
    other = [
        token for token, number in draft.get_vocab().items() if theirs.get(token, number) != number
    ]
    if other:
        raise ModelLoadError(
            f"{len(other)} tokens have other numbers in the tokenizer of the draft {name} than in "
            f"the target's, such as {other[0]!r}; STANDALONE needs a draft of the target's own "
            "vocabulary"
        )
