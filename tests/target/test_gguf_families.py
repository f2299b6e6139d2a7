"""Every family's GGUF file, as llama.cpp's converter writes it, computes what transformers does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import gguf_formats
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES, reference_model, save_small_model
from tests.support.gguf_files import CONVERSIONS, convert, forms

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]
# A model, tokens that it says, their logits, and how far these are from its own in float64.
Reference = tuple[Any, Tensor, Tensor, float]


def test_each_family_with_gguf_is_converted_here() -> None:
    declared = [name for name, _ in gguf_formats()]
    assert {FAMILIES[family] for family in CONVERSIONS} == set(declared)


class Made:
    """Small models of this file's tests, their files and what transformers computes of them, each
    made once. Forms of a family may be of one model."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self.folder = folder
        self.models: dict[str, Path] = {}
        self.file, self.reference = cache(self._file), cache(self._reference)

    def model(self, family: str, form: int = 0) -> Path:
        small = CONVERSIONS[family][form].small if family in CONVERSIONS else {}
        key = f"{family} {small}"
        if key not in self.models:
            self.models[key] = save_small_model(family, self.folder() / "small", 3, **small)
        return self.models[key]

    def _file(self, family: str, form: int) -> Path:
        folder = self.model(family, form)
        return convert(folder, self.folder() / "small.gguf", CONVERSIONS[family][form])

    def _reference(self, folder: Path, family: str) -> Reference:
        """Of the prompt and the token behind it."""
        model, tokens = reference_model(folder, family), torch.tensor([PROMPT])
        with torch.no_grad():
            best = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=1)
            expected = model(tokens).logits[0]
            exact = deepcopy(model).double()
            exact.set_experts_implementation("eager")  # grouped products are of no float64
            return model, tokens[0], expected, difference(expected, exact(tokens).logits[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(lambda: tmp_path_factory.mktemp("made"))


def source_of(path: Path) -> Any:
    return resolve_model(ModelConfig(model=str(path)))


@pytest.mark.parametrize(("family", "form"), forms())
def test_file_gives_the_logits_and_greedy_tokens_of_transformers(
    family: str, form: int, made: Made, mini_runner: Any
) -> None:
    folder, source = made.model(family, form), source_of(made.file(family, form))
    assert _described(source) == _described(source_of(folder))
    check(source, FAMILIES[family], made.reference(folder, family), mini_runner)


def _described(source: Any) -> Any:
    """What the configuration says of layers and head."""
    model, config = find_model_class(source.architectures), source.hf_config
    size = config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings
    head = model.logits_softcap(config), model.multipliers(config).logits
    return model.layer_specs(config), size, head


def test_glm_4_7_flash_loads_as_deepseek(made: Made, tmp_path: Path, mini_runner: Any) -> None:
    """Whose architecture the converter gives it."""
    folder = made.model("glm4moelite")
    path = convert(folder, tmp_path / "small.gguf", CONVERSIONS["deepseekv3"][0])
    reference = made.reference(folder, "glm4moelite")
    check(source_of(path), "DeepseekV3ForCausalLM", reference, mini_runner)


def test_mimo_that_was_converted_as_qwen2_loads_as_qwen2(
    made: Made, tmp_path: Path, mini_runner: Any
) -> None:
    """llama.cpp has no architecture of its own for it."""
    folder = made.model("mimo")
    path = convert(folder, tmp_path / "small.gguf", CONVERSIONS["qwen2"][0])
    check(source_of(path), "Qwen2ForCausalLM", made.reference(folder, "mimo"), mini_runner)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3moe", "qwen3vlmoe")],
)
def test_language_part_of_qwen_vl_loads_as_its_family(
    family: str, architecture: str, made: Made, tmp_path: Path, mini_runner: Any
) -> None:
    """What sees is a file of its own."""
    plain = CONVERSIONS[family][0]

    def metadata(fields: dict[str, Any]) -> dict[str, Any]:
        return {**plain.metadata(fields), "rope.dimension_sections": [6, 5, 5, 0]}

    conversion = replace(plain, architecture=architecture, metadata=metadata)
    folder = made.model(family)
    path = convert(folder, tmp_path / "small.gguf", conversion)
    check(source_of(path), FAMILIES[family], made.reference(folder, family), mini_runner)


@pytest.mark.parametrize("given", ["folder", "last part"])
def test_parts_of_a_model_are_read_together(
    given: str, made: Made, tmp_path: Path, mini_runner: Any
) -> None:
    folder = made.model("qwen3moe")
    parts = tmp_path / "parts"
    parts.mkdir()
    convert(folder, parts / "m.gguf", CONVERSIONS["qwen3moe"][0], tensors_a_part=12)
    names = sorted(path.name for path in parts.iterdir())
    assert names[0] == f"m-00001-of-{len(names):05d}.gguf"
    assert len(names) > 2
    path = parts if given == "folder" else parts / names[-1]
    reference = made.reference(folder, "qwen3moe")
    check(source_of(path), "Qwen3MoeForCausalLM", reference, mini_runner)
    (parts / names[1]).unlink()
    with pytest.raises(
        ModelLoadError, match=rf"{names[1]} is missing: .* one of {len(names)} parts"
    ):
        resolve_model(ModelConfig(model=str(path)))


def test_a_folder_of_several_models_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"several GGUF files: name one of a\.gguf, b\.gguf"):
        resolve_model(ModelConfig(model=str(tmp_path)))


def difference(logits: Tensor, expected: Tensor) -> float:
    """Of the largest one expected."""
    return float((logits - expected).abs().max() / expected.abs().max())


def check(source: Any, architecture: str, reference: Reference, mini_runner: Any) -> None:
    assert source.architectures == [architecture]
    model = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    _, tokens, expected, rounding = reference
    found = mini_runner(model).logits(ForwardMode.EXTEND, [tokens.tolist()])
    # Recurrent state magnifies rounding: transformers' own of qwen3_5 is 1.4e-5 on some processors.
    assert difference(found, expected) < 1e-5 + rounding
    best = found.argmax(-1)
    assert torch.equal(best, expected.argmax(-1))
    assert torch.equal(best[len(PROMPT) - 1 : -1], tokens[len(PROMPT) :])


# Of these transformers has a reader of its own.
READ_BY_TRANSFORMERS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "starcoder2",
    "qwen2moe",
    "qwen3moe",
)


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_files_written_here_give_transformers_reader_the_same_tensors(
    family: str, made: Made
) -> None:
    form = len(CONVERSIONS[family]) - 1
    path, (model, *_) = made.file(family, form), made.reference(made.model(family, form), family)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert read["tensors"].keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(read["tensors"][name], tensor, rtol=0, atol=1e-6, msg=name)
