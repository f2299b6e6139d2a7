"""The reasoning parsers by name, and which one a chat template is for."""

from __future__ import annotations

from specengine.server.reasoning.tags import ReasoningTags

_THINK = ReasoningTags("<think>", "</think>")
REASONING: dict[str, ReasoningTags] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
}


def detect_reasoning(template: str) -> ReasoningTags | None:
    """The tags that the template itself writes or looks for."""
    for tags in dict.fromkeys(REASONING.values()):
        if tags.end in template:
            return tags
    return None
