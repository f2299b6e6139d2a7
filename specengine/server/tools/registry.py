"""The formats of tool calls by name, and which one a chat template is for."""

from __future__ import annotations

from specengine.server.tools.deepseek import DeepseekV3, DeepseekV31
from specengine.server.tools.format import ToolFormat
from specengine.server.tools.glm45 import Glm45
from specengine.server.tools.gpt_oss import GptOss
from specengine.server.tools.hermes import Hermes
from specengine.server.tools.llama3_json import Llama3Json
from specengine.server.tools.mistral import Mistral
from specengine.server.tools.pythonic import Pythonic
from specengine.server.tools.qwen3_coder import Qwen3Coder

# A template for one format may have the signs of another that comes later.
FORMATS: dict[str, ToolFormat] = {
    "gpt_oss": GptOss(),
    "deepseek_v3": DeepseekV3(),
    "deepseek_v31": DeepseekV31(),
    "mistral": Mistral(),
    "glm45": Glm45(),
    "qwen3_coder": Qwen3Coder(),
    "hermes": Hermes(),
    "pythonic": Pythonic(),
    "llama3_json": Llama3Json(),
}


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches the model; None where nothing tells for certain."""
    for one in FORMATS.values():
        if all(sign in template for sign in one.signs):
            return one
    return None
