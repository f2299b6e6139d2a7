"""EAGLE drafts in the layouts that they are published in, pickled or not: converted where they must
be, loaded, and drafting without a change to the output."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specengine import LLM, SamplingParams, SpecConfig
from specengine.cli.main import main
from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.layers.rotary import RotaryEmbedding
from tests.conftest import save_tokenizer
from tests.draft import eagle_checkpoints as checkpoints
from tests.support.families import save_small_model
from tests.target.test_language_parts import CASES as WHOLE_MODELS
from tests.target.test_language_parts import save_whole
from tests.test_layering import ROOT, sources

IDS = "eagle_aux_hidden_state_layer_ids"
PROMPT = [5, 9, 4, 77, 31, 8]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By family, or by model_type of a model with a language part: with layers enough for those
    that EAGLE-3 reads where a draft does not say."""

    @cache
    def made(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("target")
        if kind in WHOLE_MODELS:
            save_whole(kind, folder, num_hidden_layers=8)
        else:
            save_small_model(kind, folder, seed=0, num_hidden_layers=8)
        save_tokenizer(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def target(targets: Callable[[str], Path]) -> Path:
    return targets("llama")


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], list[int]]:
    """What a target says alone."""
    return cache(lambda target: generate(LLM(str(target), dtype="float32", max_total_tokens=256)))


def generate(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].token_ids


def pickled(folder: Path, shards: int = 1) -> Path:
    """The draft with its weights in .bin files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        mine = names[number::shards]
        torch.save({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def with_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    return folder


def eagle_llama2(to: Path, target: Path) -> Path:
    """yuhuili/EAGLE-llama2-chat: fc has a bias; nothing is said of head_dim."""
    return pickled(with_config(checkpoints.eagle(to, target), lambda raw: raw.pop("head_dim")))


def eagle3_original(to: Path, target: Path) -> Path:
    """yuhuili/EAGLE3-*: the configuration of a Llama that says nothing of layers."""
    folder = checkpoints.eagle3(to, target)

    def edit(raw: dict[str, Any]) -> None:
        raw["architectures"] = ["LlamaForCausalLM"]
        for key in ("eagle_config", "num_hidden_layers", "draft_vocab_size", "head_dim"):
            del raw[key]

    return pickled(with_config(folder, edit))


def eagle3_sharded(to: Path, target: Path) -> Path:
    """AngelSlim: another name in `architectures`, in several files."""
    folder = checkpoints.eagle3(to, target)
    edited = with_config(folder, lambda raw: raw.update(architectures=["Eagle3LlamaForCausalLM"]))
    return pickled(edited, shards=2)


def specforge(to: Path, target: Path) -> Path:
    """SpecForge, lmsys: safetensors with an embedding."""
    return checkpoints.eagle3(to, target, embed=True)


def modelopt(to: Path, target: Path) -> Path:
    """nvidia: layers by number, options of its own."""
    folder = checkpoints.eagle3(to, target)
    tensors = {
        name.replace("midlayer.", "layers.0."): one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    raw = json.loads((folder / "config.json").read_text())
    raw["eagle_config"] |= {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    return checkpoints.save(folder, tensors, raw)


def speculators(to: Path, target: Path) -> Path:
    """RedHatAI: nested, layers counted by what they read."""
    return checkpoints.eagle3(to, target, speculators=True, norm_before_residual=True)


def with_rope(folder: Path, **rope_scaling: Any) -> Path:
    """As transformers 4 saves a Llama: what RoPE is scaled by, with the base beside it."""
    return with_config(folder, lambda raw: raw.update(rope_scaling=rope_scaling, rope_theta=1e6))


def specforge_gpt_oss(to: Path, target: Path) -> Path:
    """lmsys: a layer of Llama, without sinks, windows and experts, and not scaled as the target."""
    folder = checkpoints.eagle3(to, target)
    return with_config(folder, lambda raw: raw.update(rope_scaling=None, rope_theta=1e4))


def speculators_gpt_oss(to: Path, target: Path) -> Path:
    """RedHatAI: one norm of all features before `fc`."""
    options = {"norm_before_fc": True, "norm_before_residual": True}
    return checkpoints.eagle3(to, target, speculators=True, **options)


def specforge_llama4(to: Path, target: Path) -> Path:
    """lmsys: a dense layer, and nothing of the layers that it reads."""
    folder = checkpoints.eagle3(to, target, embed=True)
    return with_config(folder, lambda raw: raw.pop("eagle_config"))


def specforge_qwen2_5_vl(to: Path, target: Path) -> Path:
    """RoPE of three kinds of positions, which are equal in text."""
    return with_rope(checkpoints.eagle3(to, target), type="mrope", mrope_section=[2, 3, 3])


def specforge_qwen3_vl(to: Path, target: Path) -> Path:
    """RoPE of no named type, its sections side by side."""
    folder = checkpoints.eagle3(to, target)
    return with_rope(folder, mrope_interleaved=True, mrope_section=[2, 3, 3])


def speculators_eagle(to: Path, target: Path) -> Path:
    """nm-testing, HASS: words of its own for every part."""
    return checkpoints.speculators_eagle(to, target, layernorms=True, bias=True)


LAYOUTS = {
    "EAGLE": (eagle_llama2, speculators_eagle),
    "EAGLE3": (
        eagle3_original,
        eagle3_sharded,
        specforge,
        modelopt,
        speculators,
        specforge_gpt_oss,
        speculators_gpt_oss,
        specforge_llama4,
        specforge_qwen2_5_vl,
        specforge_qwen3_vl,
    ),
}
# What a layout is published for, where that is no Llama.
TARGETS = {
    specforge_gpt_oss: "gptoss",
    speculators_gpt_oss: "gptoss",
    specforge_llama4: "llama4",
    specforge_qwen2_5_vl: "qwen2_5_vl",
    specforge_qwen3_vl: "qwen3_vl",
}
CASES = [(algorithm, layout) for algorithm, made in LAYOUTS.items() for layout in made]


def load(algorithm: str, target: Path, draft: Path) -> LLM:
    spec = SpecConfig(algorithm=algorithm, draft_model_path=str(draft), num_steps=2, adaptive=False)
    return LLM(str(target), spec, dtype="float32", max_total_tokens=256)


@pytest.mark.parametrize(("algorithm", "layout"), CASES)
def test_published_draft_is_converted_where_it_must_be_and_drafts(
    algorithm: str,
    layout: Callable[[Path, Path], Path],
    targets: Callable[[str], Path],
    plain: Callable[[Path], list[int]],
    tmp_path: Path,
) -> None:
    target = targets(TARGETS.get(layout, "llama"))
    draft = layout(tmp_path / "draft", target)
    if not (draft / "model.safetensors").exists():
        with pytest.raises(ModelLoadError, match="specengine convert") as refusal:
            load(algorithm, target, draft)
        command = re.search(r"specengine (convert \S+) NEW-DIR", str(refusal.value))
        assert command is not None
        assert main([*command[1].split(), str(tmp_path / "new")]) == 0
        draft = tmp_path / "new"
    llm = load(algorithm, target, draft)
    assert generate(llm) == plain(target)
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0


@pytest.mark.parametrize("layout", TARGETS)
def test_draft_rotates_by_its_own_base_alone(
    layout: Callable[[Path, Path], Path], targets: Callable[[str], Path], tmp_path: Path
) -> None:
    """Not by what its target rotates by: GPT-OSS scales with YaRN."""
    draft = layout(tmp_path / "draft", targets(TARGETS[layout]))
    checkpoint = EagleCheckpoint.read(str(draft))
    table = RotaryEmbedding.from_config(checkpoint.layer_config(64)).cos_sin_cache
    powers = torch.arange(checkpoints.HEAD_DIM // 2) / (checkpoints.HEAD_DIM // 2)
    base = checkpoint.layer_raw["rope_theta"]
    angles = torch.arange(64)[:, None] / torch.pow(torch.tensor(base), powers)
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], dim=-1))


def test_draft_of_experts_is_refused(targets: Callable[[str], Path], tmp_path: Path) -> None:
    """SpecForge trains one for GPT-OSS, too: GptOssForCausalLMEagle3."""
    target = targets("gptoss")
    draft = checkpoints.eagle3(tmp_path / "draft", target)
    raw = json.loads((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    for name in ("gate", "up", "down"):
        del tensors[f"midlayer.mlp.{name}_proj.weight"]
    size = raw["hidden_size"]
    tensors["midlayer.mlp.router.weight"] = torch.randn(4, size)
    tensors["midlayer.mlp.experts.gate_up_proj"] = torch.randn(4, size, 2 * size)
    tensors["midlayer.mlp.experts.down_proj"] = torch.randn(4, size, size)
    raw |= {"architectures": ["GptOssForCausalLMEagle3"], "model_type": "gpt_oss"}
    checkpoints.save(draft, tensors, raw)
    with pytest.raises(
        ModelLoadError, match=r"layers\.0\.mlp\.experts\.down_proj .* no such parameter"
    ):
        load("EAGLE3", target, draft)


def test_converted_draft_has_the_tensors_and_the_fields_that_only_they_said(
    target: Path, tmp_path: Path
) -> None:
    draft = eagle3_original(tmp_path / "draft", target)
    tensors = torch.load(draft / "pytorch_model.bin", weights_only=True)
    assert main(["convert", str(draft), str(tmp_path / "new")]) == 0
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["draft_vocab_size"] == len(tensors["d2t"])
    assert (raw["num_hidden_layers"], raw["head_dim"]) == (1, checkpoints.HEAD_DIM)
    assert raw["eagle_config"] == {"use_aux_hidden_state": True}


def test_pickled_draft_is_converted_to_the_other_layout_at_once(
    target: Path, tmp_path: Path
) -> None:
    draft = eagle3_sharded(tmp_path / "draft", target)
    with_config(draft, lambda raw: raw.update(architectures=["LlamaForCausalLMEagle3"]))
    args = ["convert", str(draft), str(tmp_path / "new"), "--to", "speculators", "--target", "a/b"]
    assert main(args) == 0
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3"


class Code:
    """What a pickle that runs code would be made of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", "ran"],)


REFUSED: dict[str, tuple[Any, str]] = {
    "code": ({"fc.weight": Code()}, "holds more than tensors"),
    "no tensors": ({"fc.weight": [1, 2]}, "no table of tensors"),
    "a whole model": ({"model.layers.0.mlp.up_proj.weight": torch.ones(2)}, "no draft of EAGLE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pickled_file_of_something_else_is_refused_and_nothing_runs(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = REFUSED[name]
    draft = pickled(checkpoints.eagle3(tmp_path / "draft", target))
    torch.save(content, draft / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    from specengine.draft.eagle.convert_pickled import rewrite

    with pytest.raises(ModelLoadError, match=message):
        rewrite(draft, tmp_path / "new", force=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


UNPICKLES = re.compile(
    r"(torch(\.\w+)*|_?pickle|marshal|dill|cloudpickle|joblib)\.(load|loads|Unpickler)"
    r"|shelve\.open|pandas\.read_pickle|(transformers\.)?\w*Model\w*\.from_pretrained"
)
READS = {"load", "loads", "Unpickler", "open", "read_pickle", "from_pretrained"}
TENSORS_ALONE = "torch.load(..., weights_only=True)"
SAFE = {"weights_only=True", "use_safetensors=True"}


def unpickling(code: str) -> list[str]:
    """Each use of what reads pickled files: TENSORS_ALONE, or the source of any other. Models of
    transformers read none with use_safetensors=True."""
    nodes = list(ast.walk(ast.parse(code)))
    meant: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            meant |= {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom):
            meant |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    safe = {
        id(node.func): given
        for node in nodes
        if isinstance(node, ast.Call)
        for given in SAFE & {ast.unparse(one) for one in node.keywords}
    }
    found = []
    for node in nodes:
        last = getattr(node, "attr", None) or getattr(node, "id", None)
        if last in READS or last in meant:
            first, dot, rest = ast.unparse(node).partition(".")
            name = meant.get(first, first) + dot + rest
            if UNPICKLES.fullmatch(name):
                given = safe.get(id(node))
                if name == "torch.load" and given == "weights_only=True":
                    found.append(TENSORS_ALONE)
                elif last != "from_pretrained" or given != "use_safetensors=True":
                    found.append(name)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [] if ast.unparse(node) == "allow_pickle=False" else [ast.unparse(node)]
    return found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.load(path, weights_only=True)", TENSORS_ALONE),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=not trusted)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("import pickle as p\nmade = p.Unpickler(file).load()", "pickle.Unpickler"),
        ("read = pickle.loads", "pickle.loads"),
        ("torch.jit.load(path, weights_only=True)", "torch.jit.load"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("AutoModel.from_pretrained(path)", "AutoModel.from_pretrained"),
        (
            "from transformers import AutoModelForCausalLM as Kind\n"
            "Kind.from_pretrained(path, use_safetensors=False)",
            "transformers.AutoModelForCausalLM.from_pretrained",
        ),
    ],
)
def test_each_way_to_unpickle_is_found(code: str, found: str) -> None:
    assert unpickling(code) == [found]


def test_model_of_safetensors_alone_is_no_way_to_unpickle() -> None:
    assert unpickling("AutoModel.from_pretrained(path, use_safetensors=True)") == []


def test_checkpoints_are_unpickled_by_three_files_that_make_tensors_alone() -> None:
    """Of all of specengine: a converter, the token maps of FR-Spec, and what training saved. A
    fourth reads the code that this machine compiled from a cache of its own."""
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    assert len({path.relative_to(ROOT).parts[0] for path in texts}) == 4
    words = re.compile(r"\b(loads?|Unpickler|read_pickle|shelve|allow_pickle|from_pretrained)\b")
    found = {
        str(path.relative_to(ROOT)): uses
        for path, text in texts.items()
        if words.search(text) and (uses := unpickling(text))
    }
    assert found == {
        "draft/eagle/convert_pickled.py": [TENSORS_ALONE],
        "draft/token_map.py": [TENSORS_ALONE],
        "draft/train/checkpoint.py": [TENSORS_ALONE],
        "specengine/runner/piecewise/adaptors.py": [
            "torch._inductor.standalone_compile.CompiledArtifact.load"
        ],
    }
