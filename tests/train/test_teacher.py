"""The teacher hands out what the serving engine hands its drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError, DataError
from specengine.core.interfaces import LogitsOutput
from specengine.draft.eagle.worker import Eagle3Worker
from specengine.draft.train.features import TeacherOutput
from specengine.draft.train.teacher import Teacher
from tests.draft import eagle_checkpoints as checkpoints
from tests.train.draft_training import load_target, packed, random_documents


def test_features_are_those_of_the_worker(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed, features = list[Tensor](), Eagle3Worker.features

    def watched(self: Eagle3Worker, output: LogitsOutput, rows: Tensor | None) -> Tensor:
        assert output.features is not None
        handed.append(output.features.clone())
        return features(self, output, rows)

    monkeypatch.setattr(Eagle3Worker, "features", watched)
    target = small_models["llama"]
    draft = checkpoints.eagle3(tmp_path / "draft", target)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(draft))
    llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024, device="cpu")
    documents = random_documents([7, 30], 320)
    llm.generate(documents, SamplingParams(max_tokens=1))

    teacher = Teacher(load_target(target), checkpoints.FEATURE_LAYERS)
    assert torch.equal(torch.cat(handed), teacher.forward(packed(documents)).features)


def test_hidden_states_say_what_the_engine_says(small_models: dict[str, Path]) -> None:
    target = small_models["qwen3"]
    llm = LLM(str(target), dtype="float32", max_total_tokens=1024)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = random_documents([5, 9, 2], 320)
    documents = [
        prompt + out.token_ids
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True)
    ]
    batch = packed(documents)
    teacher = Teacher(load_target(target))
    best = teacher.logits(teacher.forward(batch).hidden).argmax(-1)
    start = 0
    for prompt, document in zip(prompts, documents, strict=True):
        said = best[start + len(prompt) - 1 : start + len(document) - 1]
        assert said.tolist() == document[len(prompt) :]
        start += len(document)


def test_documents_do_not_depend_on_what_shares_their_batch(small_models: dict[str, Path]) -> None:
    loaded = load_target(small_models["llama"])
    documents = random_documents([40, 3, 17, 33, 1], 320)
    whole = Teacher(loaded, (0, 2)).forward(packed(documents))
    parts = Teacher(loaded, (0, 2), max_tokens=48)
    assert torch.allclose(parts.forward(packed(documents)).features, whole.features, atol=1e-5)
    alone = parts.forward(packed(documents[3:4]))
    assert torch.allclose(alone.hidden, whole.hidden[60:93], atol=1e-5)


def test_head_is_read_back_from_its_packed_form(small_models: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    loaded = load_target(small_models["llama"])
    expected = load_file(small_models["llama"] / "model.safetensors")["lm_head.weight"]
    assert torch.allclose(Teacher(loaded).head_table(), expected, atol=1e-6)


def test_refusals_name_what_is_wrong(small_models: dict[str, Path]) -> None:
    loaded = load_target(small_models["llama"])
    with pytest.raises(ConfigError, match=r"\[1, 3\]: the target has layers 0\.\.2"):
        Teacher(loaded, (1, 3))
    with pytest.raises(DataError, match="a document of 600 tokens exceeds the 512 positions"):
        Teacher(loaded).forward(packed(random_documents([600], 320)))


def test_what_it_gives_can_be_learned_from(small_models: dict[str, Path]) -> None:
    """No inference tensors, which autograd refuses to keep."""
    output = Teacher(load_target(small_models["llama"]), (1,)).forward(packed([[5, 6, 7]]))
    weight = torch.ones(64, requires_grad=True)
    (output.features * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_documents_that_come_again_are_remembered_within_bounds(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_target(small_models["llama"])
    plain, teacher = Teacher(loaded, (0, 2)), Teacher(loaded, (0, 2), cache_mb=1)
    asked: list[list[int]] = []
    run = teacher._run

    def watched(input_ids: Tensor, lens: list[int]) -> TeacherOutput:
        asked.append(lens)
        return run(input_ids, lens)

    monkeypatch.setattr(teacher, "_run", watched)
    first, second, third, huge = random_documents([9, 14, 9, 500], 320)
    for documents, new in (
        ([first, second], [9, 14]),
        ([second, third, first], [9]),
        ([third, second], []),
        ([huge, first], [500]),
        ([huge], [500]),
    ):
        asked.clear()
        found, expected = (one.forward(packed(documents)) for one in (teacher, plain))
        assert torch.allclose(found.features, expected.features, atol=1e-5)
        assert torch.allclose(found.hidden, expected.hidden, atol=1e-5)
        assert [length for lens in asked for length in lens] == new
        assert teacher.cache is not None
        teacher.cache.max_bytes = 40 * found.hidden[0].nbytes * 3
    assert teacher.cache is not None
    assert teacher.cache.num_bytes == 32 * found.hidden[0].nbytes * 3
