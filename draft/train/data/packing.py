"""Documents into ragged batches, in an order that a seed fixes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import TokenDataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedBatch:
    """Whole documents one after another, without padding. T tokens, D documents."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], from 0 in each document
    document_ids: Tensor  # int64 [T], 0 .. D - 1
    lens: list[int]  # [D], tokens a document, summing up to T
    loss_mask: Tensor  # bool [T], True where the target generated the token

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(
            self.input_ids.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.document_ids.to(device, non_blocking=True),
            self.lens,
            self.loss_mask.to(device, non_blocking=True),
        )


class PackingState(TypedDict):
    """The position in a stream of batches."""

    seed: int
    epoch: int
    step: int  # batches taken in this epoch
    num_documents: int
    batch_tokens: int


class PackedBatches:
    """An endless stream of batches of at most `batch_tokens` tokens, reshuffled every epoch.

    The order follows from (seed, epoch) alone. Documents longer than `batch_tokens` are left out
    and counted in num_too_long. With several ranks each takes its share of every epoch's batches,
    equally many. Raises DataError where nothing is left to learn from.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.dataset = dataset
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self.step = 0
        self.usable = usable_documents(dataset, batch_tokens)
        self.num_too_long = len(dataset) - len(self.usable)
        self._plan = self._plan_epoch()
        if not self._plan:
            raise DataError(
                f"{dataset.files.directory} has too few documents for a batch of {batch_tokens} "
                f"tokens on each of {num_ranks} ranks; add data, or take smaller batches"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Batches of this epoch; shuffling moves the number by a few."""
        return len(self._plan)

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        if self.step >= len(self._plan):
            self.epoch, self.step = self.epoch + 1, 0
            self._plan = self._plan_epoch()
        batch = pack(self.dataset, self._plan[self.step])
        self.step += 1
        return batch

    def state_dict(self) -> PackingState:
        return PackingState(
            seed=self.seed,
            epoch=self.epoch,
            step=self.step,
            num_documents=len(self.dataset),
            batch_tokens=self.batch_tokens,
        )

    def load_state_dict(self, state: PackingState) -> None:
        """Go on exactly where `state` was taken. Raises DataError for other data or settings."""
        mine = self.state_dict()
        for name in ("seed", "num_documents", "batch_tokens"):
            if state[name] != mine[name]:
                raise DataError(
                    f"cannot resume: {name} is {mine[name]}, and was {state[name]} when the "
                    "checkpoint was written; give the same data and settings"
                )
        self.epoch, self.step = state["epoch"], state["step"]
        self._plan = self._plan_epoch()

    def _plan_epoch(self) -> list[NDArray[np.int64]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.usable)
        batches = fill_batches(self.dataset.lengths, order, self.batch_tokens)
        share = len(batches) // self.num_ranks
        return batches[self.rank :: self.num_ranks][:share]


def batches_in_order(dataset: TokenDataset, batch_tokens: int) -> Iterator[PackedBatch]:
    """Every document once, in the order of the data set: for evaluation."""
    order = usable_documents(dataset, batch_tokens)
    for indices in fill_batches(dataset.lengths, order, batch_tokens):
        yield pack(dataset, indices)


def usable_documents(dataset: TokenDataset, batch_tokens: int) -> NDArray[np.int64]:
    """int64, the documents that fit into a batch."""
    usable = np.flatnonzero(dataset.lengths <= batch_tokens)
    if len(usable) < len(dataset):
        logger.warning(
            "%d of %d documents are longer than %d tokens and left out",
            len(dataset) - len(usable),
            len(dataset),
            batch_tokens,
        )
    return usable


def fill_batches(
    lengths: NDArray[np.int64], order: NDArray[np.int64], batch_tokens: int
) -> list[NDArray[np.int64]]:
    """Cut `order` into batches, each as long as the next document still fits."""
    ends = np.cumsum(lengths[order])
    batches, start, done = [], 0, 0
    while start < len(order):
        stop = int(np.searchsorted(ends, done + batch_tokens, side="right"))
        batches.append(order[start:stop])
        start, done = stop, int(ends[stop - 1])
    return batches


def pack(dataset: TokenDataset, indices: NDArray[np.int64]) -> PackedBatch:
    documents = [dataset[index] for index in indices.tolist()]
    lens = [len(document) for document in documents]
    tokens = np.concatenate([document.tokens for document in documents]).astype(np.int64)
    loss = np.concatenate([document.loss for document in documents]).astype(bool)
    return PackedBatch(
        input_ids=torch.from_numpy(tokens),
        positions=torch.cat([torch.arange(length) for length in lens]),
        document_ids=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)),
        lens=lens,
        loss_mask=torch.from_numpy(loss),
    )
