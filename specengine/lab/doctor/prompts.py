"""What the target is asked, so that it writes the texts that drafters are judged on."""

from __future__ import annotations

from typing import Final

from specengine.core.errors import ConfigError
from specengine.lab.accept.prompts import find_prompt_sets

MOST: Final = 32  # prompts of a file that are used

BUILT_IN: Final = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between weather and climate?",
    "Write a Python function that reverses a list.",
    "List five ways to save water at home.",
    "Translate into French: Where is the nearest station?",
    "Summarise the causes of the First World War.",
    "A train travels 120 km in 90 minutes. How fast is it?",
    "Describe the taste of an apple to someone who has never had one.",
    "Give me a recipe for vegetable soup.",
    "Why is the sky blue?",
    "Write an email that asks for a day off.",
    "What are prime numbers, and why do they matter?",
    "Name three planets and one fact about each.",
    "How do I make a campfire safely?",
    "Write a poem of four lines about rain.",
)


def prompts_of(name: str | None) -> list[str]:
    """First turns of a prompt set, as `bench accept` finds them by path or name; or the built-in
    ones. Raises ConfigError or DataError."""
    if name is None:
        return list(BUILT_IN)
    (found,) = find_prompt_sets([name], None)
    prompts = [prompt.turns[0] for prompt in found.limited(MOST).prompts]
    if len(prompts) < 2:
        raise ConfigError(f"--prompts {name} has one prompt; intervals need two at least")
    return prompts
