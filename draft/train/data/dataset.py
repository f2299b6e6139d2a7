"""Token data sets on disk, memory-mapped.

A directory of
  tokens.npy   uint16 (vocabularies up to 65,536) or uint32 [T], all documents one after another
  offsets.npy  int64 [N + 1], where each document begins, and the end of the last
  loss.npy     uint8 [T], 1 where the target generated the token as its answer, 0 elsewhere
  manifest.json
A document is a whole conversation, as the serving chat template renders it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specengine.core.errors import DataError
from specengine.draft.train.data.manifest import FILES, Manifest, file_sha256

TokenIds = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Document:
    """One conversation. Views of the memory-mapped files: read-only."""

    tokens: TokenIds  # [L]
    loss: NDArray[np.uint8]  # [L], 1 where the target generated the token

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenFiles:
    """The arrays of a data set; its splits share them."""

    directory: Path
    manifest: Manifest
    tokens: TokenIds
    offsets: NDArray[np.int64]
    loss: NDArray[np.uint8]


class TokenDataset:
    """The documents of a data set, or some of them.

    `verify` compares the files with the hashes in the manifest. Raises DataError where a file is
    missing, damaged or does not fit the others.
    """

    def __init__(self, directory: Path | str, verify: bool = True) -> None:
        self._init(_open(Path(directory), verify), None)

    def _init(self, files: TokenFiles, chosen: NDArray[np.int64] | None) -> None:
        self.files = files
        count = len(files.offsets) - 1
        self.indices = np.arange(count, dtype=np.int64) if chosen is None else chosen
        self.lengths = np.diff(files.offsets)[self.indices]  # int64 [N], tokens a document

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Document:
        place = self.indices[index]
        start, end = self.files.offsets[place], self.files.offsets[place + 1]
        return Document(self.files.tokens[start:end], self.files.loss[start:end])

    @property
    def documents(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> TokenDataset:
        """Those documents of this data set, in this order."""
        part = object.__new__(TokenDataset)
        part._init(self.files, self.indices[np.asarray(indices, dtype=np.int64)])
        return part

    def split(self, held_out_fraction: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
        """-> (training, held out). A document's place depends on its own tokens and the seed alone:
        equal documents stay together, and a data set that grows keeps its split."""
        if not 0.0 <= held_out_fraction < 1.0:
            raise DataError(f"the held-out fraction must lie in [0, 1), got {held_out_fraction}")
        shares = np.array([document_share(one.tokens, seed) for one in self.documents])
        held_out = shares < held_out_fraction
        return self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))

    def check_target(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """Raise DataError where the documents are not in this model's tokens."""
        made_for = self.manifest.target
        if made_for.tokenizer != tokenizer_sha256:
            raise DataError(
                f"{self.files.directory} was tokenized by another tokenizer than this model's (it "
                f"was made for {made_for.name}); make it again with this model"
            )
        if made_for.vocab_size != vocab_size:
            raise DataError(
                f"{self.files.directory} has a vocabulary of {made_for.vocab_size} tokens, and "
                f"this model one of {vocab_size}"
            )


def document_share(tokens: TokenIds, seed: int) -> float:
    """A number in [0, 1) that follows from the document and the seed; see HELD_OUT_RULE."""
    key = (seed % 2**63).to_bytes(8, "little")
    digest = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") / 2**64


def _open(directory: Path, verify: bool) -> TokenFiles:
    manifest = Manifest.read(directory)
    if verify:
        _check_hashes(directory, manifest)
    try:
        tokens, offsets, loss = (np.load(directory / name, mmap_mode="r") for name in FILES)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the data set {directory}: {error}") from error
    _check_shapes(directory, tokens, offsets, loss)
    return TokenFiles(directory, manifest, tokens, np.array(offsets), loss)


def _check_hashes(directory: Path, manifest: Manifest) -> None:
    for name in FILES:
        try:
            found = file_sha256(directory / name)
        except OSError as error:
            raise DataError(f"the data set {directory} lacks {name}: {error}") from error
        if found != manifest.sha256.get(name):
            raise DataError(
                f"{directory / name} is damaged: its SHA-256 is {found[:16]}…, and the manifest "
                f"says {str(manifest.sha256.get(name))[:16]}…; make the data set again"
            )


def _check_shapes(
    directory: Path, tokens: NDArray[Any], offsets: NDArray[Any], loss: NDArray[Any]
) -> None:
    if tokens.dtype not in (np.uint16, np.uint32) or offsets.dtype != np.int64:
        raise DataError(f"{directory}: tokens are {tokens.dtype}, offsets {offsets.dtype}")
    if len(offsets) < 2:
        raise DataError(f"the data set {directory} is empty")
    fits = offsets[0] == 0 and offsets[-1] == len(tokens) == len(loss)
    if not fits or np.any(np.diff(offsets) <= 0):
        raise DataError(f"{directory}: offsets, tokens and loss do not fit each other")
