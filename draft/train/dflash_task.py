"""Training DFlash drafters for a target."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specengine.core.errors import ConfigError
from specengine.core.options import option
from specengine.draft.rope import draft_rope
from specengine.draft.train.acceptance import accepted_length
from specengine.draft.train.config import TrainSection
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.dflash import Blocks, DFlashDraft
from specengine.draft.train.documents import DraftRows
from specengine.draft.train.eagle3_task import default_feature_layers, draft_shape, sample_batch
from specengine.draft.train.export import DTYPES, dflash_config, write_drafter
from specengine.draft.train.losses import LOSSES, Mixture
from specengine.draft.train.task import Sums, TaskLoss
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.unroll import Borrowed, rotary_table
from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_MAX_ELEMENTS = 1 << 27  # of logits that are there at once


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(TrainSection):
    section: ClassVar[str] = "task"

    block_size: int = option(8, "tokens of a block, the root included")
    num_layers: int = option(2, "decoder layers")
    anchors: int = option(512, "blocks that a batch is learned from, drawn from its answers")
    decay: float = option(4.0, "a draft counts exp(-1 / decay) of the one before it")
    soft_cross_entropy: float = option(1.0, "weight of the loss against the target's distribution")
    hard_cross_entropy: float = option(0.0, "weight of the loss against the target's best token")
    total_variation: float = option(0.0, "weight of 1 - acceptance of a sampled draft")
    log_acceptance: float = option(0.0, "weight of minus the logarithm of that acceptance")
    mask_token_id: int | None = option(
        None, "the target's token that marks what is to be filled in; default: its last one"
    )
    intermediate_size: int | None = option(None, "width of its feed-forward; default: the target's")
    num_heads: int | None = option(None, "heads of queries; default: the target's")
    num_kv_heads: int | None = option(None, "heads of keys and values; default: the target's")
    feature_layers: tuple[int, ...] | None = option(
        None, "layers of the target, counted from 0, whose outputs it reads; default: EAGLE-3's"
    )
    feature_cache_mb: int = option(
        0, "MiB, where the target is, for its outputs on documents that come again; 0: run it anew"
    )
    dtype: str = option("bfloat16", "of the exported weights", ("bfloat16", "float32"))

    def _check_ranges(self) -> None:
        self._at_least(2, "block_size")
        self._at_least(1, "num_layers", "anchors", "intermediate_size", "num_heads", "num_kv_heads")
        self._at_least(0, *LOSSES, "feature_cache_mb", "mask_token_id")
        self._require(self.decay > 0, "decay", "must lie above 0")
        self._require(any(self.loss_weights.values()), "soft_cross_entropy", "some loss must weigh")

    @property
    def loss_weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in LOSSES}


class DFlashTask:
    """A draft.train.task.TrainTask, made by make_dflash_task."""

    name = "dflash"

    def __init__(
        self, module: DFlashDraft, teacher: Teacher, config: DFlashConfig, shape: LayerSpec
    ) -> None:
        self.module, self.teacher, self.config, self.shape = module, teacher, config, shape
        self.mixture = Mixture(config.loss_weights)
        self.depth = config.block_size - 1

    def loss(self, batch: PackedBatch) -> TaskLoss:
        rows = self._draft_rows(batch)
        places = self._anchors(rows)
        chosen = torch.randperm(len(places), device=places.device)[: self.config.anchors]
        blocks = Blocks.of(rows, places[chosen].sort().values, self.config.block_size)
        steps = torch.arange(self.depth, device=places.device)
        weights = torch.exp(-steps / self.config.decay)
        judged = self.module(rows, blocks, partial(self._judge, rows=rows, blocks=blocks))
        counts = judged.learns.sum(0).float()
        total = (judged.losses.sum(0) * weights).sum()
        count = (counts * weights).sum()
        names = [f"match_{step}" for step in range(self.depth)]
        matches = (judged.matches & judged.learns).sum(0).float()
        return TaskLoss(
            total / count.clamp_min(1.0),
            count.detach(),
            dict(zip(names, matches.unbind(), strict=True)),
            dict(zip(names, counts.unbind(), strict=True)),
        )

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Sums:
        """Evaluate blocks at every anchor, a part at a time."""
        rows = self._draft_rows(batch)
        sums = torch.zeros(2 + 2 * self.depth, device=batch.input_ids.device)
        for part in torch.split(self._anchors(rows), self.config.anchors):
            blocks = Blocks.of(rows, part, self.config.block_size)
            judged = self.module(rows, blocks, partial(self._judge, rows=rows, blocks=blocks))
            drafted, accepted = judged.chains()
            found = [judged.losses.sum()[None], judged.learns.sum()[None].float()]
            sums += torch.cat([*found, drafted, accepted])
        names = [f"{kind}_{step}" for kind in ("drafted", "accepted") for step in range(self.depth)]
        return dict(zip(["loss", "compared", *names], sums.unbind(), strict=True))

    def summary(self, sums: Sums) -> dict[str, float]:
        """loss, in nats a position; acceptance_k, the share of drafted tokens at position k that
        are accepted, where all before them were; and the accepted length of a block, bonus token
        included, at an average place of the answers."""
        values = {name: float(value) for name, value in sums.items()}
        steps = range(self.depth)
        rates = [values[f"accepted_{k}"] / max(values[f"drafted_{k}"], 1.0) for k in steps]
        return {
            "loss": values["loss"] / max(values["compared"], 1.0),
            "accepted_length": accepted_length(rates),
            **{f"acceptance_{step}": rate for step, rate in enumerate(rates)},
        }

    def export(self, directory: Path) -> None:
        """In z-lab's layout. The target's embedding and head are not stored."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors["fc.weight"] = self.module.checkpoint_fc()
        sizes = self.config.num_layers, self.config.block_size, self.module.mask_token_id
        model = self.teacher.loaded.model
        config = dflash_config(
            self.teacher.config, self.shape, model.vocab_size, sizes, self.teacher.feature_layers
        )
        write_drafter(directory, tensors, config, DTYPES[self.config.dtype])

    def _draft_rows(self, batch: PackedBatch) -> DraftRows:
        output = self.teacher.forward(batch)
        return DraftRows.of(batch, output.features, output.hidden)

    def _anchors(self, rows: DraftRows) -> Tensor:
        """int64 [N], ascending: rows whose next token is an answer, and that have some before."""
        return (rows.learns & (rows.positions > 0)).nonzero()[:, 0]

    def _judge(self, states_ABH: Tensor, rows: DraftRows, blocks: Blocks) -> _Judged:
        """The masked rows against the target, which says token i + 1 at row i."""
        said_AD = blocks.rows_AB()[:, :-1]  # where the target says what these rows are to say
        last = rows.num_rows - 1
        learns_AD = (said_AD <= last) & rows.learns[said_AD.clamp(max=last)]
        # A document's rows follow one another: learning stops for good where an answer does.
        learns_AD = learns_AD.cumprod(1).bool()
        places = learns_AD.flatten().nonzero()[:, 0]
        targets = said_AD.flatten()[places]
        states = states_ABH[:, 1:].flatten(0, 1)[places]
        losses, matches, greedy = torch.zeros(3, learns_AD.numel(), device=states.device)
        size = max(1, _MAX_ELEMENTS // self.teacher.vocab_size)
        for part in range(0, len(places), size):
            at = slice(part, part + size)
            found = checkpoint(
                self._judge_part, states[at], rows.hidden[targets[at]], use_reentrant=False
            )
            losses = losses.index_copy(0, places[at], found[0])
            matches[places[at]] = found[1].float()
            greedy[places[at]] = (found[2] == rows.tokens_at(0)[targets[at]]).float()
        shape = learns_AD.shape
        return _Judged(
            losses.view(shape), matches.view(shape).bool(), greedy.view(shape).bool(), learns_AD
        )

    def _judge_part(self, states: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> losses, whether the best tokens agree, and the target's best."""
        assert self.module.borrowed.head is not None
        logits = states @ self.module.borrowed.head.to(states.dtype).T
        log_probs = self.teacher.logits(hidden).log_softmax(-1)
        best = log_probs.argmax(-1)
        return self.mixture(logits, log_probs, best), logits.detach().argmax(-1) == best, best


@dataclass(frozen=True)
class _Judged:
    """A blocks of D drafts each. greedy: whether the document's token is the target's best."""

    losses: Tensor  # float32 [A, D], 0 where nothing is learned
    matches: Tensor  # bool
    greedy: Tensor  # bool
    learns: Tensor  # bool, within the answer

    def chains(self) -> tuple[Tensor, Tensor]:
        """float32 [D] each: drafts that were reached, and those of them accepted. A chain goes on
        where the document does as the target says."""
        goes_on = (self.matches & self.greedy).cumprod(1).bool()
        reached = torch.ones_like(goes_on)
        reached[:, 1:] = goes_on[:, :-1]
        reached &= self.learns
        return reached.sum(0).float(), (reached & self.matches).sum(0).float()


def make_dflash_task(
    loaded: LoadedModel, documents: TokenDataset, config: DFlashConfig
) -> DFlashTask:
    """Initial weights are drawn from torch's generator. Raises ConfigError or DataError."""
    layers = config.feature_layers or default_feature_layers(loaded.model.num_layers)
    teacher = Teacher(loaded, layers, cache_mb=config.feature_cache_mb)
    mask = teacher.vocab_size - 1 if config.mask_token_id is None else config.mask_token_id
    if mask >= teacher.vocab_size:
        raise ConfigError(f"task.mask_token_id={mask}: the target has {teacher.vocab_size} tokens")
    shape = replace(draft_shape(loaded.model, config), qk_norm=True)  # as those of Qwen3
    borrowed = Borrowed(
        teacher.embed_table,
        teacher.head_table().to(teacher.dtype),
        rotary_table(teacher, shape, draft_rope(teacher.config)),
    )
    feature_size = len(layers) * teacher.hidden_size
    module = DFlashDraft(shape, config.num_layers, feature_size, borrowed, mask)
    sample = teacher.forward(sample_batch(documents).to(teacher.device))
    module.begin(sample.features.cpu(), teacher.final_norm().cpu())
    size = sum(one.numel() for one in module.parameters())
    logger.info(
        "DFlash draft: %.2f M parameters, blocks of %d, features of layers %s",
        size / 1e6,
        config.block_size,
        list(layers),
    )
    return DFlashTask(module, teacher, config, shape)
