"""SGLang's and vLLM's own EAGLE-3 models, loaded from a draft's directory as each engine would."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hollow import PeerFinder, peer_modules
from plain_layers import LAYERS
from safetensors.torch import load_file
from torch import Tensor, nn

SGLANG = ("sglang.srt.models.llama_eagle3",)
VLLM = (
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.utils",
    "vllm.transformers_utils.configs.eagle",
    "vllm.transformers_utils.configs.speculators.algos",
    "vllm.transformers_utils.configs.speculators.base",
)


@dataclass
class Peer:
    """A peer's model, loaded. capture: as its code counts, what layers read; id n is the output of
    layer n - 1. step: (tokens, positions, states or features, as the model takes them) -> what its
    head reads, and what the next step continues. best: of the former -> the target's token."""

    model: Any
    capture: tuple[int, ...]
    step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    best: Callable[[Tensor], int]


def method_of(file: Path, name: str) -> Callable[..., Any]:
    """One method out of a source file that is too large to run."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = next(node for node in nodes if node.name == name)
    found.returns = None
    found.decorator_list = []
    space: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), str(file), "exec"), space)
    method: Callable[..., Any] = space[name]
    return method


def lend(model: Any, target: Any) -> None:
    """The target's embedding, as both engines do where a draft brings none; a head is its own."""
    model.model.embed_tokens.weight = target.model.embed_tokens.weight
    empty = [name for name, one in model.named_parameters() if one.isnan().any()]
    assert not empty, f"nothing was loaded into {empty}"


@contextmanager
def in_sglang(root: Path, draft: Path, target: Any) -> Iterator[Peer]:
    from transformers import LlamaConfig

    config: Any = LlamaConfig.from_pretrained(draft)
    with peer_modules(PeerFinder(root, SGLANG, LAYERS)):
        module: Any = importlib.import_module(SGLANG[0])
        model = module.LlamaForCausalLMEagle3(config).float()
        model.load_weights(load_file(draft / "model.safetensors").items())
        lend(model, target)
        capturer = SimpleNamespace(
            pp_group=SimpleNamespace(is_last_rank=True), config=target.config, model=target.model
        )
        choose = method_of(root / "sglang/srt/models/llama.py", "set_eagle3_layers_to_capture")
        choose(capturer, (config.eagle_config or {}).get("eagle_aux_hidden_state_layer_ids"))
        hot = model.get_hot_token_id()

        def step(tokens: Tensor, positions: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            batch = SimpleNamespace(
                spec_info=SimpleNamespace(hidden_states=states),
                mm_input_embeds=None,
                forward_mode=SimpleNamespace(is_extend=lambda: False),
            )
            output, (state,) = model.model(tokens, positions, batch)
            return output, state

        def best(output: Tensor) -> int:
            place = model.logits_processor(model.lm_head, output).argmax(-1)
            return int(place if hot is None else hot[place])

        layers = tuple(target.model.layers_to_capture)
        captured = tuple(layer for layer in layers if layer < len(target.model.layers))
        assert captured == layers, "of the last layer SGLang has no output: it keeps inputs"
        yield Peer(model, captured, step, best)


@contextmanager
def in_vllm(root: Path, draft: Path, target: Any) -> Iterator[Peer]:
    with peer_modules(PeerFinder(root, VLLM, LAYERS)):
        config = vllm_config(draft)
        speculative = SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=config), parallel_drafting=False
        )
        whole = SimpleNamespace(
            speculative_config=speculative,
            model_config=SimpleNamespace(
                dtype=torch.float32,
                get_total_num_hidden_layers=lambda: len(target.model.layers),
                get_vocab_size=lambda: target.config.vocab_size,
            ),
        )
        module: Any = importlib.import_module(VLLM[0])
        module.get_draft_quant_config = lambda config: None
        model = module.Eagle3LlamaForCausalLM(vllm_config=whole).float()
        nn.Module.train(model, False)
        model.load_weights(load_file(draft / "model.safetensors").items())
        assert model.has_own_lm_head, "else vLLM lends the target's, for all of its tokens"
        lend(model, target)
        choose = method_of(
            root / "vllm/v1/worker/gpu_model_runner.py", "_get_eagle3_aux_layers_from_config"
        )
        usual = method_of(
            root / "vllm/model_executor/models/interfaces.py",
            "get_eagle3_default_aux_hidden_state_layers",
        )
        runner = SimpleNamespace(speculative_config=speculative)
        layers = choose(runner) or usual(target)
        size = config.hidden_size

        def step(tokens: Tensor, positions: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            fused = states if states.shape[-1] == size else model.combine_hidden_states(states)
            output, state = model(tokens, positions, fused)
            return output, state

        def best(output: Tensor) -> int:
            return int(model.compute_logits(output).argmax(-1))

        yield Peer(model, tuple(layers), step, best)


def vllm_config(draft: Path) -> Any:
    """As vLLM makes it of either layout."""
    from transformers import LlamaConfig

    raw = json.loads((draft / "config.json").read_text())
    if "speculators_model_type" not in raw:
        eagle: Any = importlib.import_module(VLLM[2])
        return eagle.EAGLEConfig(LlamaConfig.from_pretrained(draft), method="eagle3")
    algorithms: Any = importlib.import_module(VLLM[3])
    base: Any = importlib.import_module(VLLM[4])
    base.SUPPORTED_SPECULATORS_TYPES = algorithms.SUPPORTED_SPECULATORS_TYPES
    given = base.SpeculatorsConfig.extract_transformers_pre_trained_config(raw)
    config = base.SpeculatorsConfig(**given)
    if not getattr(config, "rope_parameters", None):
        config.standardize_rope_params()
    return config
