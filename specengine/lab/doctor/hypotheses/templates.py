"""Another chat template in training than in serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from specengine.lab.doctor.hypothesis import SERVED, Hypothesis, Trial

NONE = "no chat template"
OWN = "the chat template beside the draft"
_LABELLED = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}Assistant:"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
_LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)


def renderings(served: str | None, draft: Path) -> dict[str, str | None]:
    """Templates by name; None is no template."""
    found: dict[str, str | None] = {SERVED: served}
    own = _template_beside(draft)
    if own is not None and own != served:
        found[OWN] = own
    if served is not None:
        found[NONE] = None
    common = {"ChatML": _CHATML, "Llama 3": _LLAMA3, "labelled turns": _LABELLED}
    return found | {f"a template of the kind {name}": text for name, text in common.items()}


def hypotheses(names: list[str], trial: Trial) -> Iterator[Hypothesis]:
    for name in names:
        if name != SERVED:
            yield Hypothesis(
                "chat template",
                f"trained on texts with {name}",
                f"serve with {name} (--chat-template FILE), or train again on texts that the "
                "target's own template renders",
                view=replace(trial.view, text=name),
                other_tokens=True,
            )


def _template_beside(draft: Path) -> str | None:
    jinja = draft / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    try:
        found = json.loads((draft / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None
