"""Finding MTP layers, beside every kind of target, and refusing what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.registry import MODEL_FAMILIES
from specengine.draft.mtp.checkpoint import find_layers
from specengine.draft.mtp.form import DEEPSEEK, ERNIE, MIMO, QWEN3_NEXT, MtpForm
from specengine.draft.mtp.form import FORMS as EVERY_FORM
from specengine.draft.mtp.load import load_mtp
from specengine.target.registry import find_model_class
from tests.draft.mtp_reading import FORMS, add_mtp
from tests.draft.test_mtp_model import TARGETS, load_models, load_target


def _without(folder: Path, *endings: str) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.endswith(endings)}
    save_file(tensors, path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", FORMS[:2])
def test_every_dense_target_can_carry_them(
    form: str, family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models[family], tmp_path, form, layers=2)
    assert len(load_models(folder, num_steps=2)) == 2


@pytest.mark.parametrize(
    ("form", "ids"),
    [("deepseek", [3, 4]), ("qwen3_next", [0, 1]), ("mimo", [0, 1]), ("ernie", [0, 1])],
)
def test_layers_are_found_by_their_names(
    form: str, ids: list[int], small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models[TARGETS[form]], tmp_path, form, layers=2)
    assert [layer.layer_id for layer in find_layers(folder, 64)] == ids


def test_a_separate_directory_may_count_from_zero(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    """As checkpoints are exported that hold DeepSeek's layer and nothing else."""
    beside = add_mtp(small_models["llama"], tmp_path / "beside", "deepseek")
    alone = Path(shutil.copytree(beside, tmp_path / "alone"))
    tensors = load_file(alone / "model.safetensors")
    layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.3.")}
    renamed = {n.replace("layers.3.", "layers.0."): t for n, t in layer.items()}
    save_file(renamed, alone / "model.safetensors")
    [found] = load_mtp(load_target(small_models["llama"], draft_model_path=str(alone))).models
    [expected] = load_models(beside)
    ours, theirs = cast(Any, found).state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("family", "form", "ids"),
    [
        ("llama", DEEPSEEK, [3]),
        ("qwen3next", QWEN3_NEXT, [0]),
        ("mimo", MIMO, [0, 1]),
        ("ernie4_5_moe", ERNIE, [0]),
    ],
)
def test_dummy_targets_get_dummy_layers(
    family: str, form: MtpForm, ids: list[int], small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = small_models[family if family != "mimo" else "llama"]
    if family == "mimo":
        folder = add_mtp(small_models["qwen2"], tmp_path, "mimo", layers=2)
    models = load_models(folder, load_format="dummy", num_steps=len(ids))
    assert [(model.name.form, model.name.layer_id) for model in models] == [(form, i) for i in ids]


def test_every_family_names_a_form_of_mtp_layers() -> None:
    named = {find_model_class([name]).mtp_form for name in MODEL_FAMILIES}
    assert named == {form.name for form in EVERY_FORM}


def test_no_layers_names_what_was_looked_for(small_models: dict[str, Path]) -> None:
    names = (
        r"model\.layers\.\*\.eh_proj\.weight \(DeepSeek-V3\), "
        r"mtp\.layers\.\*\.input_layernorm\.weight \(Qwen3-Next\), "
        r"model\.mtp_layers\.\*\.input_proj\.weight \(MiMo\), "
        r"model\.mtp_linear_proj\.\*\.weight \(ERNIE 4\.5\).*--speculative-draft-model-path"
    )
    with pytest.raises(ModelLoadError, match=names):
        load_models(small_models["llama"])


@pytest.mark.parametrize("form", FORMS)
def test_another_hidden_size_is_refused(
    form: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models[TARGETS[form]], tmp_path, form)
    rule = r"\[64, 128\].*hidden_size 64; the target's hidden_size is 80.*--speculative-draft-mod"
    with pytest.raises(ModelLoadError, match=rule):
        find_layers(folder, 80)


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        ("deepseek", "model.layers.3.shared_head.norm.weight"),
        ("deepseek", "model.layers.3.self_attn.k_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_norm.weight"),
        ("mimo", "model.mtp_layers.0.self_attn.q_proj.bias"),
        ("mimo", "model.mtp_layers.0.final_layernorm.weight"),
        ("ernie", "model.mtp_emb_norm.0.weight"),
        ("ernie", "model.mtp_block.0.mlp.down_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_the_checkpoint_names_it(
    form: str, missing: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models[TARGETS[form]], tmp_path, form)
    target = load_target(folder)
    _without(folder, missing)
    with pytest.raises(ModelLoadError, match=f"missing tensor {missing}"):
        load_mtp(target)


def test_a_layer_of_another_kind_is_refused(small_models: dict[str, Path], tmp_path: Path) -> None:
    """An expert of a mixture has no place in a dense layer."""
    folder = add_mtp(small_models["llama"], tmp_path, "deepseek")
    path, name = folder / "model.safetensors", "model.layers.3.mlp.experts.0.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors["model.layers.3.mlp.up_proj.weight"].clone()}, path)
    with pytest.raises(ModelLoadError, match=f"unexpected tensor {name}.*DeepSeek-V3"):
        load_models(folder)


def test_extra_layers_that_the_configuration_does_not_name_stay_unexpected(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models["llama"], tmp_path, "deepseek")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"unexpected tensor model\.layers\.3\."):
        load_target(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 3}, "--speculative-num-steps 3: the checkpoint has 2 MTP layers.*for 2"),
        ({"num_steps": 2, "eagle_topk": 4}, "--speculative-eagle-topk 4: the 2 MTP layers.*chain"),
    ],
)
def test_layers_a_step_bound_the_steps_and_draft_chains(
    options: dict[str, int], message: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models["llama"], tmp_path, "deepseek", layers=2)
    with pytest.raises(ConfigError, match=message):
        load_models(folder, **options)
    assert len(load_models(folder, num_steps=1)) == 1


def test_one_layer_serves_every_step_and_trees(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = add_mtp(small_models["llama"], tmp_path, "deepseek")
    assert len(load_models(folder, num_steps=5, eagle_topk=4)) == 1


def test_a_path_that_is_nothing_is_refused(small_models: dict[str, Path]) -> None:
    with pytest.raises(
        ModelLoadError, match=r"--speculative-draft-model-path no/such/one: neither"
    ):
        load_models(small_models["llama"], draft_model_path="no/such/one")
