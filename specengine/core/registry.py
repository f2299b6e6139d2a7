"""What can be named, and where each is written: a new one is one file and one line here.

A place is "module:class". Nothing is imported before it is asked for, so flags and checks know
every name at no cost.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# By the name that config.json gives in `architectures`. The order is that of small models in tests,
# whose random weights depend on it: new ones stand last.
MODEL_FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "specengine.target.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "specengine.target.models.llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "specengine.target.models.qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "specengine.target.models.qwen:Qwen3ForCausalLM",
    "MiMoForCausalLM": "specengine.target.models.mimo:MiMoForCausalLM",
}


def load_place(place: str) -> Any:
    """What stands at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
