"""Data made by a real engine on a tiny model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specengine.core.config import EngineConfig, ModelConfig, ScheduleConfig
from specengine.core.errors import ConfigError, DataError
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.train.data.manifest import Manifest
from specengine.engine.chat_template import render_chat
from specengine.engine.llm import LLM
from specengine.lab.generate.batch_writer import BatchWriter
from specengine.lab.generate.config import GenerationConfig
from specengine.lab.generate.make import make_dataset
from tests.train.chat_model import save_chat_model

LIMITS: dict[str, Any] = {"max_len": 160, "answer_max_tokens": 24, "user_max_tokens": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat_model")
    save_chat_model(folder)
    return folder


def engine_config(model: Path, rows: int = 8) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", context_length=256),
        schedule=ScheduleConfig(max_running_requests=rows),
    )


def make(model: Path, out: Path, rows: int = 8, **settings: Any) -> TokenDataset:
    config = GenerationConfig(**(LIMITS | settings))
    return make_dataset(engine_config(model, rows), config, out, lambda batch_writer: None)


@pytest.fixture(scope="module")
def fourteen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Of fourteen conversations, seed 1, in one go."""
    return make(model, tmp_path_factory.mktemp("fourteen"), max_conversations=14, seed=1)


def write_prompts(path: Path, rows: Sequence[list[str]]) -> str:
    lines = [json.dumps({"id": i, "category": "test", "turns": r}) for i, r in enumerate(rows)]
    path.write_text("\n".join(lines))
    return str(path)


def contents(dataset: TokenDataset) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens.tolist(), one.loss.tolist()) for one in dataset.documents]


def test_documents_are_what_the_server_feeds(model: Path, tmp_path: Path) -> None:
    """The first answer follows the first prompt as the server renders it; the second follows the
    whole conversation, in whose text the first answer stands as clients were shown it."""
    turns = [[f"Hello {i}", f"And then {i}?"] for i in range(16)]
    prompts = write_prompts(tmp_path / "p.jsonl", turns)
    settings: dict[str, Any] = {"temperatures": (1.0,), "min_answer_tokens": 1}
    dataset = make(model, tmp_path / "d", prompts=(prompts,), **settings)
    llm = LLM(str(model), device="cpu", context_length=256)
    tokenizer = llm.tokenizer
    seconds = 0
    for document in dataset.documents:
        tokens = document.tokens.tolist()
        first, second = next(t for t in turns if f"{t[0]}<" in tokenizer.decode(tokens))
        conversation = [{"role": "user", "content": first}]
        prompt = render_chat(tokenizer, conversation)
        assert tokens[: len(prompt)] == prompt
        asked = render_chat(tokenizer, [{"role": "user", "content": second}])
        place = find(tokens, asked)
        if place is None:
            assert [0] * len(prompt) + [1] * (len(tokens) - len(prompt)) == document.loss.tolist()
            continue
        seconds += 1
        shown = tokenizer.decode(tokens[len(prompt) : place], skip_special_tokens=True)[:-1]
        conversation.append({"role": "assistant", "content": shown})
        conversation.append({"role": "user", "content": second})
        start = place + len(asked)
        assert tokens[:start] == render_chat(tokenizer, conversation)
        assert document.loss[start:].all()
        assert not document.loss[place:start].any()
    assert seconds >= 4


def find(tokens: list[int], part: list[int]) -> int | None:
    places = range(len(tokens) - len(part) + 1)
    return next((i for i in places if tokens[i : i + len(part)] == part), None)


def test_greedy_answers_are_the_engines(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [["Hello there"], ["Name three things"]])
    dataset = make(model, tmp_path / "d", prompts=(prompts,), temperatures=(0.0,))
    llm = LLM(str(model), device="cpu", context_length=256)
    from specengine.core.sampling import SamplingParams

    for document in dataset.documents:
        start = int(np.flatnonzero(document.loss)[0])
        prompt, answer = document.tokens[:start].tolist(), document.tokens[start:].tolist()
        sampling = SamplingParams(temperature=0, max_tokens=24)
        generated = llm.generate([prompt], sampling)[0].token_ids
        assert generated[: len(answer)] == answer
        assert document.loss[start:].all()


def test_the_same_seed_gives_the_same_data(
    model: Path, fourteen: TokenDataset, tmp_path: Path
) -> None:
    """However many requests run at a time."""
    one = make(model, tmp_path / "a", rows=3, max_conversations=14, seed=1)
    other = make(model, tmp_path / "b", rows=16, max_conversations=5, seed=2)
    assert one.manifest.sha256 == fourteen.manifest.sha256
    assert one.manifest.counts == fourteen.manifest.counts
    assert len(one) >= 5
    assert len(other) > 0
    assert not any(document in contents(one) for document in contents(other))


def test_an_interrupted_run_goes_on(
    model: Path, fourteen: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.lab.generate.batch_writer.PART_TOKENS", 200)
    config = GenerationConfig(max_conversations=14, seed=1, **LIMITS)

    def stop(batch_writer: BatchWriter) -> None:
        if batch_writer.num_conversations > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(engine_config(model), config, tmp_path / "a", stop)
    with pytest.raises(DataError, match="made otherwise"):
        make(model, tmp_path / "a", max_conversations=14, seed=2)
    resumed = make_dataset(engine_config(model), config, tmp_path / "a", lambda batch_writer: None)
    assert resumed.manifest.sha256 == fourteen.manifest.sha256
    assert resumed.manifest.counts == fourteen.manifest.counts


def test_max_tokens_keeps_the_shortest_beginning(
    model: Path, fourteen: TokenDataset, tmp_path: Path
) -> None:
    short = make(model, tmp_path / "a", max_tokens=60, seed=1)
    assert contents(short) == contents(fourteen)[: len(short)]
    answers = [sum(loss) for _, loss in contents(short)]
    assert sum(answers) >= 60
    last = short.manifest.counts["answer_tokens"] - 60
    assert last < sum(answers)


def test_shards_share_the_conversations(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [[f"Tell me about {i}"] for i in range(9)])
    settings: dict[str, Any] = {"prompts": (prompts,), "temperatures": (0.0,)}
    whole = make(model, tmp_path / "whole", **settings)
    parts = [
        make(model, tmp_path / f"{i}", shard_index=i, num_shards=2, **settings) for i in range(2)
    ]
    assert sorted(contents(whole)) == sorted(contents(parts[0]) + contents(parts[1]))


def test_prompts_and_self_written_turns_mix(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [[f"Tell me about {i}"] for i in range(5)])
    dataset = make(
        model, tmp_path / "d", prompts=(prompts,), self_written=0.5, max_conversations=24
    )
    counts = dataset.manifest.counts
    assert counts["category: test"] >= 4
    assert any(name.startswith("category: self-written") for name in counts)


def test_repeats_of_a_prompt_differ(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [["Tell me about it"]])
    dataset = make(model, tmp_path / "d", prompts=(prompts,), prompt_repeats=4, temperatures=(1.0,))
    assert len({tuple(one.tokens.tolist()) for one in dataset.documents}) == len(dataset) >= 3


def test_evaluation_prompts_are_left_out(model: Path, tmp_path: Path) -> None:
    rows = [["How many eggs are there in the big basket today"], ["Tell me about trains"]]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    exam = write_prompts(
        tmp_path / "e.jsonl", [["Say, how many eggs are there in the big basket?"]]
    )
    dataset = make(model, tmp_path / "d", prompts=(prompts,), decontaminate=(exam,))
    assert dataset.manifest.counts["dropped: prompt in the evaluation set"] == 1
    assert dataset.manifest.counts["conversations"] == 2


def test_the_manifest_says_how_it_was_made(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [["Tell me about trains"]])
    made = make(model, tmp_path / "d", prompts=(prompts,), seed=9)
    manifest = Manifest.read(tmp_path / "d")
    llm = LLM(str(model), device="cpu", context_length=256)
    assert manifest.target.tokenizer == tokenizer_sha256(llm.tokenizer)
    made.check_target(manifest.target.tokenizer, llm.engine.parts.vocab_size)
    assert manifest.seed == 9
    digest = hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    assert manifest.made["files"] == {"p.jsonl": digest}
    assert manifest.made["answer_max_tokens"] == 24
    assert "versions" in manifest.made["environment"]
    counts = manifest.counts
    assert counts["tokens"] == made.num_tokens
    assert counts["answer_tokens"] == int(made.files.loss.sum())


def test_too_long_prompts_are_counted(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [["word " * 200], ["Tell me about trains"]])
    dataset = make(model, tmp_path / "d", prompts=(prompts,))
    assert dataset.manifest.counts["dropped: sample too long"] == 1
    assert max(dataset.lengths) <= LIMITS["max_len"]


def test_time_bounds_a_run(model: Path, tmp_path: Path) -> None:
    dataset = make(model, tmp_path / "d", max_minutes=0.005)
    assert len(dataset) > 0


def test_hopeless_targets_are_given_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.lab.generate.batch_writer.HOPELESS", 8)
    with pytest.raises(DataError, match=r"left nothing to learn from.*prompt too short"):
        make(model, tmp_path / "d", max_minutes=1.0, min_prompt_words=1000, user_max_tokens=140)


def test_wrong_settings(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-len 300 exceeds the context length 256"):
        make(model, tmp_path / "d", max_len=300, max_tokens=10)
    with pytest.raises(ConfigError, match="--concurrency 9 exceeds --max-running-requests 8"):
        make(model, tmp_path / "d", concurrency=9, max_tokens=10)
    with pytest.raises(ConfigError, match="would never end"):
        GenerationConfig()
    with pytest.raises(ConfigError, match="the rest needs --prompts"):
        GenerationConfig(self_written=0.5, max_tokens=10)
    with pytest.raises(ConfigError, match="--shard-index 2: must be below"):
        GenerationConfig(shard_index=2, num_shards=2, max_tokens=10)
    with pytest.raises(ConfigError, match="temperatures"):
        GenerationConfig(temperatures=(), max_tokens=10)
