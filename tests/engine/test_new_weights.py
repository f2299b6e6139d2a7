"""Other weights in the place of those that run: all or nothing, and as if the engine were new."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS
from tests.halves import slow_but
from tests.support.families import FAMILIES

TINY = "tiny"
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=5)
PROMPTS = ["Hello! Who are you?", "Count from one to ten."]
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
SPECS = {
    "plain": None,
    "NGRAM": SpecConfig(algorithm="NGRAM", adaptive=False),
    "EAGLE3": SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False),
    "STANDALONE": SpecConfig(algorithm="STANDALONE", num_steps=2, adaptive=False),
}


def noisy(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A checkpoint like `source`, each tensor as `change` makes it."""
    target.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    (weights,) = source.glob("*.safetensors")
    save_file(
        {name: change(name, t) for name, t in load_file(weights).items()}, target / weights.name
    )
    return target


def shaken(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
    return tensor + (0.3 * tensor.float().std() * noise).to(tensor)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's checkpoint, with noise on every weight."""
    llm = LLM(TINY, **FLAGS)
    assert llm.engine.weights is not None
    directory = llm.engine.weights.loaded.source.directory
    assert directory is not None
    return noisy(directory, tmp_path_factory.mktemp("weights") / "other", shaken)


def eagle_directory() -> Path:
    return Path(str(SHIPPED_DRAFTERS["tiny-eagle3"].directory))


def of_its_own(spec: SpecConfig | None) -> SpecConfig | None:
    """The same with its shipped drafter by name, beside a model of another name."""
    names = {"EAGLE3": "tiny-eagle3", "STANDALONE": "tiny-standalone"}
    if spec is None or spec.algorithm not in names:
        return spec
    return replace(spec, draft_model_path=names[spec.algorithm])


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [one.token_ids for one in llm.generate(PROMPTS, params)]
    llm.engine.scheduler.check_invariant()
    return found


@pytest.mark.parametrize("name", slow_but(["NGRAM", "EAGLE3"], SPECS))
def test_updated_engine_answers_as_a_new_one(name: str, other: Path) -> None:
    llm = LLM(TINY, SPECS[name], **FLAGS)
    before = answers(llm)
    assert llm.update_weights(str(other)) > 0
    after, fresh = answers(llm), LLM(str(other), of_its_own(SPECS[name]), **FLAGS)
    assert after == answers(fresh) != before
    assert answers(llm, SAMPLED) == answers(fresh, SAMPLED)
    assert llm.generate(PROMPTS, GREEDY)[0].spec == fresh.generate(PROMPTS, GREEDY)[0].spec


@pytest.mark.slow
def test_updated_engine_in_pieces_answers_as_a_new_one(other: Path) -> None:
    """What was traced holds the weights, on a CPU perhaps in another form than the new ones."""
    llm = LLM(TINY, **FLAGS, cuda_graph_mode="piecewise")
    before = answers(llm)
    llm.update_weights(str(other))
    assert answers(llm) == answers(LLM(str(other), **FLAGS)) != before
    assert llm.engine.stats().num_eager_forwards == 0


def test_pieces_are_traced_again_only_where_a_weight_of_the_trace_is_gone(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights have another form behind numbers that are no bfloat16, and are not traced."""
    first = noisy(small_models["llama"], tmp_path / "first", lambda _, t: t.bfloat16().to(t))
    second = noisy(first, tmp_path / "second", shaken)
    sizes: dict[str, Any] = {"piecewise_cuda_graph_tokens": (8, 64)}
    llm = LLM(str(first), **FLAGS, cuda_graph_mode="piecewise", **sizes)
    runner = llm.engine.parts.worker.runner
    pieces, before, model = runner.pieces, answers(llm), cast(Any, runner.model)
    assert pieces is not None
    traced = pieces.graph
    llm.update_weights(str(second))
    assert answers(llm) == answers(LLM(str(second), **FLAGS)) != before
    assert pieces.graph is traced
    assert llm.engine.stats().num_eager_forwards == 0
    norm, built = model.model.norm, list[str]()
    monkeypatch.setattr(pieces, "_build", lambda: built.append("again"))
    pieces.refresh()
    assert not built
    norm.weight = torch.nn.Parameter(norm.weight * 1.0, requires_grad=False)
    pieces.refresh()
    assert built


def test_weights_of_before_give_the_answers_of_before(other: Path) -> None:
    llm = LLM(TINY, SPECS["EAGLE3"], **FLAGS)
    before = answers(llm)
    llm.update_weights(str(other))
    llm.update_weights(TINY)
    assert answers(llm) == before


@pytest.mark.parametrize("name", slow_but(["plain", "EAGLE3"], SPECS))
def test_unfinished_requests_go_on_with_the_new_weights(name: str, other: Path) -> None:
    """What stood stays; what follows is what the new weights continue it with."""
    llm = LLM(TINY, SPECS[name], **FLAGS)
    prompts = [list(llm.tokenizer(text)["input_ids"]) for text in PROMPTS]
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        llm.engine.add_request(str(index), prompt, GREEDY)

    def step() -> None:
        for output in llm.engine.step():
            found[output.rid] = output.token_ids  # all so far

    for _ in range(4):
        step()
    begun = {rid: list(tokens) for rid, tokens in found.items()}
    assert any(begun.values())
    held = sum(req.kv_len for req in llm.engine.scheduler.queues.live)
    # A round that was in flight is committed first; on a CPU there is none.
    assert llm.update_weights(str(other)) == held > 0
    assert llm.engine.stats().num_free_slots == llm.engine.stats().num_slots
    while llm.engine.has_work:
        step()
    llm.engine.scheduler.check_invariant()
    fresh = LLM(str(other), **FLAGS)
    for index, prompt in enumerate(prompts):
        start = begun[str(index)]
        rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - len(start))
        expected = fresh.generate([[*prompt, *start]], rest)[0].token_ids
        assert found[str(index)] == start + expected


def test_prompts_half_read_are_read_again(other: Path) -> None:
    llm = LLM(TINY, SPECS["EAGLE3"], **FLAGS, chunked_prefill_size=16)
    prompt = [(7 * i * i + 3 * i) % 3000 + 5 for i in range(60)]
    llm.engine.add_request("long", prompt, GREEDY)
    llm.engine.step()
    llm.update_weights(str(other))
    tokens: list[int] = []
    while llm.engine.has_work:
        for output in llm.engine.step():
            tokens = output.token_ids
    assert tokens == LLM(str(other), **FLAGS).generate([prompt], GREEDY)[0].token_ids


def test_drafter_alone_is_replaced(tmp_path: Path) -> None:
    """By one of noise, which accepts less, and back."""
    llm = LLM(TINY, SPECS["EAGLE3"], **FLAGS)
    before = llm.generate(PROMPTS, GREEDY)
    spoiled = noisy(
        eagle_directory(),
        tmp_path / "spoiled",
        lambda name, t: torch.randn_like(t) if t.is_floating_point() else t,
    )
    llm.update_weights(draft_model=str(spoiled))
    with_noise = llm.generate(PROMPTS, GREEDY)
    llm.update_weights(draft_model="tiny-eagle3")
    again = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in with_noise] == [one.token_ids for one in before]
    accepted = [sum(g.spec.num_accepted for g in run) for run in (before, with_noise, again)]
    assert accepted[1] < accepted[0] == accepted[2]


def test_tensors_take_the_place_of_a_checkpoint(other: Path) -> None:
    llm = LLM(TINY, **FLAGS)
    (weights,) = other.glob("*.safetensors")
    llm.update_weights_from_tensors(load_file(weights))
    assert answers(llm) == answers(LLM(str(other), **FLAGS))


REFUSED: dict[str, tuple[Callable[[str, Tensor], Tensor], str]] = {
    "a shape": (lambda name, t: t[:-1] if name.endswith("norm.weight") else t, "shape"),
    "a type": (lambda name, t: t.to(torch.int8) if "q_proj" in name else t, "type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_changes_nothing(case: str, other: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    llm = LLM(TINY, SPECS["EAGLE3"], **FLAGS)
    before = answers(llm)
    with pytest.raises(ModelLoadError, match=message):
        llm.update_weights(str(noisy(other, tmp_path / "bad", change)))
    assert answers(llm) == before


def test_missing_tensor_changes_nothing(other: Path) -> None:
    llm = LLM(TINY, **FLAGS)
    before = answers(llm)
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors[next(name for name in tensors if "down_proj" in name)]
    with pytest.raises(ModelLoadError, match="missing tensor"):
        llm.update_weights_from_tensors(tensors)
    assert answers(llm) == before


def test_other_configuration_is_refused_by_its_field(other: Path, tmp_path: Path) -> None:
    changed = noisy(other, tmp_path / "changed", lambda name, t: t)
    config = changed / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.25}))
    llm = LLM(TINY, **FLAGS)
    with pytest.raises(ModelLoadError, match=r"rms_norm_eps 0\.25"):
        llm.update_weights(str(changed))


def test_configuration_of_training_alone_is_not_compared(other: Path, tmp_path: Path) -> None:
    """Versions of transformers write these fields or leave them out."""
    changed = noisy(other, tmp_path / "changed", lambda name, t: t)
    config = changed / "config.json"
    fields = json.loads(config.read_text())
    fields.pop("attention_dropout")
    more = {"initializer_range": 0.5, "pad_token_id": 1, "transformers_version": "4.0.0"}
    config.write_text(json.dumps(fields | more))
    llm = LLM(TINY, **FLAGS)
    before = answers(llm)
    llm.update_weights(str(changed))
    assert answers(llm) != before


def test_weights_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(TINY, SPECS["EAGLE3"], **FLAGS)
    with pytest.raises(ModelLoadError, match="name too long"):
        llm.update_weights("a" * 300)
    with pytest.raises(ModelLoadError, match="name too long"):
        llm.update_weights(draft_model="a" * 300)
    weights: Any = llm.engine.weights
    monkeypatch.setattr(weights, "_target", lambda source: 1 // 0)
    with pytest.raises(ModelLoadError, match="ZeroDivisionError"):
        llm.update_weights("tiny")


def test_nothing_named_is_refused() -> None:
    llm = LLM(TINY, **FLAGS)
    with pytest.raises(ConfigError, match="name a model"):
        llm.update_weights()
    with pytest.raises(ConfigError, match="the engine has no drafter"):
        llm.update_weights(draft_model="tiny-eagle3")
    llm = LLM(TINY, SPECS["NGRAM"], **FLAGS)
    with pytest.raises(ConfigError, match="the engine has the drafter NGRAM, which has no model"):
        llm.update_weights(draft_model="tiny-eagle3")


# Whose class makes tensors out of others', and beside them each kind of layer and of scales.
FAST = (
    *("qwen3moe", "granitemoe", "ernie4_5_moe", "minimaxm2", "gptoss", "qwen3next", "qwen3_5moe"),
    *("llama4", "stablelm", "gptneox", "deepseekv3", "cohere2", "gemma3", "granite", "phi3"),
)


@pytest.mark.parametrize("family", slow_but(FAST, FAMILIES))
def test_each_family_takes_new_weights(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever a layer derives from its weights follows them."""
    flags = {**FLAGS, "max_running_requests": 4}
    first = small_models[family]
    second = noisy(first, tmp_path / "second", shaken)
    llm = LLM(str(first), **flags)
    before = told(llm)
    llm.update_weights(str(second))
    after, fresh = told(llm), told(LLM(str(second), **flags))
    assert after == pytest.approx(fresh, abs=1e-4)
    assert after != pytest.approx(before, abs=1e-2)


def told(llm: LLM) -> list[float]:
    """Some tokens, and their log-probabilities."""
    found = llm.generate(PROMPTS[-1], replace(GREEDY, max_tokens=4, logprobs=0))[0]
    return [*found.token_ids, *(one.logprob for one in found.completions[0].logprobs)]
