"""The forms in which checkpoints keep layers that predict further tokens (MTP).

All of them are one equation (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23):

    out_i = final_norm(layer(projection(cat(norm(embed(token_{i+1})), norm(hidden_i)))))
    logits of token_{i+2} = lm_head(out_i)

They differ in the names of the tensors, in the order of the two halves, and in what the layers of
one checkpoint share. What is not in the tensors, and where it was read (2026-11):

hidden_i: the target's state *after* its final norm. vLLM's and SGLang's models hand their drafters
what their own head reads; Qwen3.5 lost a third of its accepted length on the state before it
(LightLLM #1402, llama.cpp #24025); DeepSeek-R1's own modeling code does the same (ROCm ATOM #1764).

The next step's hidden_i: `out_i`, with the final norm. So SGLang in all three forms, vLLM in
Qwen3-Next's and MiMo's; for DeepSeek's, vLLM fed the state before the norm and changed it, for more
accepted tokens (vLLM #45895, #47448).

The head: nothing but the matrix, because `out_i` is normed already. ERNIE 4.5's layer has no norm
of its own behind it and takes the target's, in Baidu's own FastDeploy (ernie4_5_mtp.py). vLLM has
none there, and drafts worse in a comparison of both against transformers (vMLX, ernie4_5_moe.py).

Position 0: nothing is masked. vLLM (DeepSeek, MiMo, ERNIE) and SGLang (MiMo) zero the embedding
there, from when their row 0 held token_0 and no hidden state (vLLM #12755, #14137). Here, as in
training (the paper; FastMTP, arXiv:2509.18362), row 0 holds token_1 and hidden_0, like any other
row.

Norms are the target family's: plain weights on most, gains that count from 1 in Qwen3-Next's and
Qwen3.5's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ID = "{id}"


@dataclass(frozen=True)
class MtpForm:
    """Where the parts of layer `{id}` are in a checkpoint; what has no `{id}` the layers share."""

    name: str
    root: str  # how every tensor begins
    layer: str  # self_attn.*, mlp.* and their two norms
    embedding_norm: str
    hidden_norm: str
    projection: str  # [H, 2 H]
    final_norm: str | None  # None: the target's
    embed_tokens: str | None  # may be absent: the target's
    lm_head: str | None  # may be absent: the target's
    hidden_first: bool = False  # the projection reads [hidden, embedding]

    @property
    def anchor(self) -> str:
        """A tensor that every layer has, and nothing else in any checkpoint is called."""
        own = self.projection if _ID in self.projection else self.layer + ".input_layernorm"
        return own + ".weight"

    def layer_ids(self, names: list[str]) -> list[int]:
        """Ids of the layers among the names of a checkpoint, ascending."""
        pattern = re.compile(_pattern(self.anchor))
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))

    def owns(self, name: str, layer_id: int) -> bool:
        """Whether a tensor is part of this layer, or shared by it."""
        numbered = (self.layer, self.embedding_norm, self.hidden_norm, self.projection)
        found = (re.match(_pattern(part) + r"\.", name) for part in numbered if _ID in part)
        is_other = any(one is not None and int(one[1]) != layer_id for one in found)
        return name.startswith(self.root.format(id=layer_id)) and not is_other

    def checkpoint_name(self, name: str, layer_id: int) -> str:
        """`name` of a parameter of MtpModel, as the checkpoint calls it."""
        part, _, rest = name.partition(".")
        template = getattr(self, part)
        return f"{template.format(id=layer_id)}.{rest}"


@dataclass(frozen=True)
class MtpLayerName:
    """One layer of a checkpoint."""

    form: MtpForm
    layer_id: int
    has_embed_tokens: bool = False  # it brings its own; otherwise the target's serves
    has_lm_head: bool = False

    def owns(self, name: str) -> bool:
        return self.form.owns(name, self.layer_id)

    def tensor(self, parameter: str) -> str:
        """The checkpoint's name of a parameter of MtpModel."""
        return self.form.checkpoint_name(parameter, self.layer_id)


def _pattern(template: str) -> str:
    return re.escape(template).replace(re.escape(_ID), r"(\d+)")


DEEPSEEK: Final = MtpForm(
    name="DeepSeek-V3",
    root="model.layers.{id}.",
    layer="model.layers.{id}",
    embedding_norm="model.layers.{id}.enorm",
    hidden_norm="model.layers.{id}.hnorm",
    projection="model.layers.{id}.eh_proj",
    final_norm="model.layers.{id}.shared_head.norm",
    embed_tokens="model.layers.{id}.embed_tokens",
    lm_head="model.layers.{id}.shared_head.head",
)
QWEN3_NEXT: Final = MtpForm(
    name="Qwen3-Next",
    root="mtp.",
    layer="mtp.layers.{id}",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    final_norm="mtp.norm",
    embed_tokens="mtp.embed_tokens",
    lm_head=None,
)
MIMO: Final = MtpForm(
    name="MiMo",
    root="model.mtp_layers.{id}.",
    layer="model.mtp_layers.{id}",
    embedding_norm="model.mtp_layers.{id}.token_layernorm",
    hidden_norm="model.mtp_layers.{id}.hidden_layernorm",
    projection="model.mtp_layers.{id}.input_proj",
    final_norm="model.mtp_layers.{id}.final_layernorm",
    embed_tokens=None,
    lm_head=None,
    hidden_first=True,
)
ERNIE: Final = MtpForm(
    name="ERNIE 4.5",
    root="model.mtp_",
    layer="model.mtp_block.{id}",
    embedding_norm="model.mtp_emb_norm.{id}",
    hidden_norm="model.mtp_hidden_norm.{id}",
    projection="model.mtp_linear_proj.{id}",
    final_norm=None,
    embed_tokens=None,
    lm_head=None,
)
FORMS: Final = (DEEPSEEK, QWEN3_NEXT, MIMO, ERNIE)


def form_named(name: str) -> MtpForm:
    """name: what a target's family states as its mtp_form."""
    return next(form for form in FORMS if form.name == name)
