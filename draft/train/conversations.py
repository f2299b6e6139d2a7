"""Text to train a target on: conversations of a file, or those that another model wrote."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, DataError
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.train.data.manifest import TargetIdentity
from specengine.draft.train.data.writer import DatasetWriter, Part, count_documents
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer

Conversation = list[dict[str, str]]  # messages with role and content

_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_PART = 2000  # conversations


def read_conversations(source: Path) -> Iterator[Conversation]:
    """Those of a JSONL file (`messages`, answers included), or of a data set whose target speaks
    ChatML; system messages are left out. Raises DataError."""
    if not source.is_dir():
        return _of_file(source)
    return _of_dataset(TokenDataset(source))


def _of_file(path: Path) -> Iterator[Conversation]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _messages(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the conversations {path}: {error}") from error


def _messages(line: str, place: str) -> Conversation:
    try:
        messages = json.loads(line)["messages"]
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{place}: an object with `messages` of role and content is wanted"
        ) from error


def _of_dataset(dataset: TokenDataset) -> Iterator[Conversation]:
    name = dataset.manifest.target.name
    tokenizer = load_tokenizer(resolve_model(ModelConfig(model=name)))
    dataset.check_target(tokenizer_sha256(tokenizer), dataset.manifest.target.vocab_size)
    for document in dataset.documents:
        text = tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False)
        turns = _CHATML_TURN.findall(text)
        if not turns:
            raise DataError(
                f"{dataset.files.directory} holds no ChatML conversations; give a JSONL file of "
                "`messages` as task.text"
            )
        yield [{"role": role, "content": content.strip()} for role, content in turns]


def texts_of(conversations: Iterable[Conversation]) -> Iterator[str]:
    return (message["content"] for messages in conversations for message in messages)


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    directory: Path,
    name: str,
    made: Mapping[str, Any],
) -> TokenDataset:
    """A data set in this tokenizer's ids and template, longer conversations cut at
    made["max_positions"].

    name: of the model that the documents are for. made: what they follow from. Raises ConfigError
    where the tokenizer has no chat template, and DataError where nothing can be learned.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, so conversations cannot be written out; add a "
            "chat_template to its tokenizer_config.json, or train a tokenizer (no task.tokenizer)"
        )
    identity = TargetIdentity(
        name=name,
        weights="",
        tokenizer=tokenizer_sha256(tokenizer),
        chat_template=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        vocab_size=len(tokenizer),
    )
    writer = DatasetWriter(directory, len(tokenizer), made)
    iterator, place = iter(conversations), 0
    while chunk := list(islice(iterator, _PART)):
        place += len(chunk)
        documents, counts = _encode(chunk, tokenizer, int(made["max_positions"]))
        counts.update(count_documents(documents))
        writer.append(Part(documents, place, counts, np.zeros(0, dtype=np.uint64)))
    return writer.finish(identity, seed=0, made=made)


def _encode(
    conversations: Sequence[Conversation], tokenizer: Any, max_len: int
) -> tuple[list[Document], Counter[str]]:
    pieces = [_pieces(messages, tokenizer) for messages in conversations]
    texts = [text for one in pieces for text in one]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    documents, counts = [], Counter[str]()
    for one in pieces:
        ids: list[int] = []
        loss: list[int] = []
        for index in range(len(one)):
            piece = next(encoded).ids
            ids += piece
            loss += _answer_mask(piece, tokenizer.eos_token_id) if index % 2 else [0] * len(piece)
        counts["cut"] += len(ids) > max_len
        if sum(loss[:max_len]) == 0:
            counts["without_answer"] += 1
            continue
        tokens = np.array(ids[:max_len], dtype=np.uint32)
        documents.append(Document(tokens, np.array(loss[:max_len], dtype=np.uint8)))
    return documents, counts


def _answer_mask(ids: Sequence[int], eos: int) -> list[int]:
    """What is generated ends with the end-of-turn token; the template goes on after it."""
    count = ids.index(eos) + 1 if eos in ids else len(ids)
    return [1] * count + [0] * (len(ids) - count)


def _pieces(messages: Conversation, tokenizer: Any) -> list[str]:
    """The conversation as the template renders it: what leads up to an answer, the answer, what
    leads up to the next, ..."""
    messages = [message for message in messages if message["role"] != "system"]
    pieces, done = [], ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _render(messages[:index], tokenizer, True)
            whole = _render(messages[: index + 1], tokenizer, False)
            if not whole.startswith(prompt) or not prompt.startswith(done):
                raise ConfigError(
                    "the chat template renders earlier turns otherwise once later ones are there; "
                    "train on single turns, or with another template"
                )
            pieces += [prompt[len(done) :], whole[len(prompt) :]]
            done = whole
    return pieces


def _render(messages: Sequence[Mapping[str, str]], tokenizer: Any, opens_answer: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=opens_answer, tokenize=False
    )
    return text
