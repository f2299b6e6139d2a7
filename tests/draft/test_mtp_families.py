"""MTP layers of families whose layers are not Llama's, against transformers' own layer: the last of
a model of one layer more, under the names that published checkpoints give it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from tests.draft.test_mtp_model import TOKENS, Runner, assert_near, load_models
from tests.halves import slow_but
from tests.support.families import reference_model, save_small_model
from tests.support.mtp_targets import predictable

MORE: dict[str, dict[str, Any]] = {
    "deepseekv3": {},
    "glm4moe": {},
    "glm4moelite": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 2},  # layer 3 is dense
}
LAYER = "model.layers.3"
_DEEPSEEK = {
    "layer": LAYER,
    "embedding": f"{LAYER}.enorm",
    "hidden": f"{LAYER}.hnorm",
    "projection": f"{LAYER}.eh_proj",
    "last": f"{LAYER}.shared_head.norm",
}
_ERNIE = {
    "layer": "model.mtp_block.0",
    "embedding": "model.mtp_emb_norm.0",
    "hidden": "model.mtp_hidden_norm.0",
    "projection": "model.mtp_linear_proj.0",
    "last": "model.norm",
}


def names_of(family: str) -> dict[str, str]:
    return _ERNIE if family == "ernie4_5_moe" else _DEEPSEEK


PROMPTS = ["The quick brown fox", "0123456789" * 9, "x"]
NEW_TOKENS = 12


class Reading:
    """The equations of DeepSeek-V3 (arXiv:2412.19437, 21 to 23) around transformers' layers."""

    def __init__(self, longer: Path, target: Path, family: str) -> None:
        self.model = reference_model(longer, family)
        self.weights, self.names = load_file(target / "model.safetensors"), names_of(family)

    def norm(self, x: Tensor, part: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        scaled: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * self.weights[f"{self.names[part]}.weight"]

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """The target's states after its final norm, [T, H]."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        found: Tensor = self.model.model.norm(states[3])[0]
        return found

    @torch.no_grad()
    def mtp(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """tokens: of each row the next; hidden: what each row continues -> states, [T, H]."""
        inner, count = self.model.model, len(tokens)
        pair = self.norm(inner.embed_tokens(torch.tensor(tokens)), "embedding")
        joined = torch.cat([pair, self.norm(hidden, "hidden")], dim=-1)
        x = (joined @ self.weights[f"{self.names['projection']}.weight"].T)[None]
        places = torch.arange(count)[None]
        future = torch.full((1, 1, count, count), float("-inf")).triu(1)
        angles = inner.rotary_emb(x, places)
        out = inner.layers[3](
            x, attention_mask=future, position_ids=places, position_embeddings=angles
        )
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], "last")

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(states)
        return found


@pytest.fixture(scope="module", params=list(MORE))
def folders(
    request: pytest.FixtureRequest,
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, str]:
    """A model of four layers; the same as one of three with an MTP layer; the family."""
    family: str = request.param
    root = tmp_path_factory.mktemp(family)
    longer, target = root / "longer", root / "target"
    save_small_model(family, longer, 7, num_hidden_layers=4, **MORE[family])
    for path in small_models["llama"].glob("*token*"):
        (longer / path.name).write_bytes(path.read_bytes())
    shutil.copytree(longer, target)
    edit(target, lambda fields: fields | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1})
    names, size = names_of(family), 64
    weights = {
        name.replace(f"{LAYER}.", f"{names['layer']}."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    generator = torch.Generator().manual_seed(3)
    shapes = {"projection": (size, 2 * size), "embedding": (size,), "hidden": (size,)}
    if family != "ernie4_5_moe":  # whose last norm is the target's
        shapes["last"] = (size,)
    for part, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made = noise * 0.12 if len(shape) == 2 else 1 + 0.2 * noise
        weights[f"{names[part]}.weight"] = made
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return longer, target, family


def edit(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if "mlp_layer_types" in fields:
        fields["mlp_layer_types"] = fields["mlp_layer_types"][:3]
    path.write_text(json.dumps(change(fields)))


def greedy(folder: Path, spec: SpecConfig | None = None, **flags: Any) -> list[Any]:
    llm = LLM(str(folder), spec, dtype="float32", max_total_tokens=4096, **flags)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    found = llm.generate(PROMPTS, params)
    llm.engine.scheduler.check_invariant()
    return found


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [one.token_ids for one in outputs]


def test_states_and_logits_equal_transformers(folders: tuple[Path, Path, str]) -> None:
    reading = Reading(*folders)
    hidden = reading.hidden(TOKENS[:-1])
    expected = reading.mtp(TOKENS[1:], hidden)
    [model] = load_models(folders[1])
    states, logits = Runner(model)(TOKENS[1:], hidden)
    assert_near(states, expected)
    assert_near(logits, reading.logits(expected))


@pytest.mark.parametrize("topk", slow_but([1], [1, 3]), ids=["chain", "tree"])
def test_drafts_change_no_token(topk: int, folders: tuple[Path, Path, str]) -> None:
    spec = SpecConfig(
        algorithm="MTP",
        adaptive=False,
        num_steps=3,
        eagle_topk=topk,
        num_draft_tokens=9 if topk > 1 else None,
    )
    found = greedy(folders[1], spec, chunked_prefill_size=16)
    assert tokens_of(found) == tokens_of(greedy(folders[1]))


def test_drafts_of_a_predictable_target_all_stand(
    folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """Its layers add nothing, so that the last token alone decides, for both alike."""
    form = "ernie" if folders[2] == "ernie4_5_moe" else "deepseek"
    folder = predictable(shutil.copytree(folders[1], tmp_path / "made"), form, 1, residue=0.0)
    spec = SpecConfig(algorithm="MTP", adaptive=False, num_steps=3)
    for one in greedy(folder, spec):
        assert one.spec.num_accepted == NEW_TOKENS - 1 - one.spec.num_rounds
