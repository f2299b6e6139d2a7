"""Writes data sets piece by piece, so that a process that is killed loses one piece at most.

While it is being made, a data set is a folder `parts` of numbered files, each written in one go;
`finish` turns them into the files that dataset.py reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.manifest import (
    FILES,
    MANIFEST,
    Manifest,
    TargetIdentity,
    file_sha256,
    write_atomically,
)

PARTS = "parts"
RECIPE = "recipe.json"


@dataclass(frozen=True)
class Part:
    """A piece of a data set, with what its maker needs to go on after it."""

    documents: Sequence[Document]
    position: int  # the maker's, after this piece
    counts: Mapping[str, int]  # what happened since the piece before, by name
    keys: NDArray[np.uint64]  # the maker's: what it has seen since the piece before


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class DatasetWriter:
    """Appends parts to a directory. One that was left unfinished goes on after its last part.

    recipe: what the documents follow from; parts of another recipe are refused with DataError.
    """

    def __init__(self, directory: Path, vocab_size: int, recipe: Mapping[str, Any]) -> None:
        self.directory = directory
        self.counts: Counter[str] = Counter()
        self.position = 0
        self._dtype = token_dtype(vocab_size)
        self._folder = directory / PARTS
        self._num_parts = 0
        if (directory / MANIFEST).exists():
            raise DataError(f"{directory} holds a finished data set already; choose another place")
        self._claim(json.dumps(recipe, indent=1, sort_keys=True, default=str) + "\n")

    def _claim(self, recipe: str) -> None:
        path = self._folder / RECIPE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_text(encoding="utf-8") != recipe:
                raise DataError(
                    f"{self.directory} holds an unfinished data set that was made otherwise "
                    f"({path} says how); give the same settings, or choose another place"
                )
            write_atomically(path, recipe)
        except OSError as error:
            raise DataError(f"cannot write to {self.directory}: {error}") from error

    def resume(self) -> Iterator[Part]:
        """What is written already, part by part; the documents are left out."""
        for path in sorted(self._folder.glob("*.npz")):
            with np.load(path) as file:
                about = json.loads(str(file["about"]))
                part = Part((), about["position"], about["counts"], file["keys"])
            self._note(part)
            yield part

    def append(self, part: Part) -> None:
        """Raises DataError where the disk does not take it; what was written before is kept."""
        path = self._folder / f"{self._num_parts:06}.npz"
        about = json.dumps({"position": part.position, "counts": dict(part.counts)})
        try:
            with path.with_suffix(".tmp").open("wb") as file:
                columns = _columns(part.documents, self._dtype)
                np.savez(file, **columns, keys=part.keys, about=np.array(about))
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".tmp").replace(path)
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error}; make room and run the same command again to go on"
            ) from error
        self._note(part)

    def finish(self, target: TargetIdentity, seed: int, made: Mapping[str, Any]) -> TokenDataset:
        """Join the parts. Raises DataError where no part has a document."""
        paths = sorted(self._folder.glob("*.npz"))
        lengths = [_load(path, "lengths") for path in paths]
        offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        if len(offsets) < 2:
            raise DataError(f"no document was made, so {self.directory} has no data set")
        columns = (("tokens", self._dtype), ("loss", np.uint8))
        for name, dtype in columns:
            _join(self.directory / f"{name}.npy", paths, name, dtype, int(offsets[-1]))
        np.save(self.directory / "offsets.npy", offsets)
        manifest = Manifest(
            target=target,
            seed=seed,
            made=dict(made),
            counts=dict(sorted(self.counts.items())),
            sha256={name: file_sha256(self.directory / name) for name in FILES},
        )
        manifest.write(self.directory)
        shutil.rmtree(self._folder)
        return TokenDataset(self.directory, verify=False)

    def _note(self, part: Part) -> None:
        self._num_parts += 1
        self.position = part.position
        self.counts.update(part.counts)


def count_documents(documents: Sequence[Document]) -> dict[str, int]:
    return {
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "answer_tokens": sum(int(document.loss.sum()) for document in documents),
    }


def write_dataset(
    directory: Path,
    documents: Sequence[Document],
    target: TargetIdentity,
    seed: int = 0,
    made: Mapping[str, Any] | None = None,
) -> TokenDataset:
    """A whole data set in one go."""
    writer = DatasetWriter(directory, target.vocab_size, made or {})
    none = np.zeros(0, dtype=np.uint64)
    writer.append(Part(documents, len(documents), count_documents(documents), none))
    return writer.finish(target, seed, made or {})


def _columns(documents: Sequence[Document], dtype: type[np.unsignedinteger[Any]]) -> dict[str, Any]:
    tokens = [np.asarray(document.tokens, dtype=dtype) for document in documents]
    loss = [np.asarray(document.loss, dtype=np.uint8) for document in documents]
    return {
        "tokens": np.concatenate([np.zeros(0, dtype), *tokens]),
        "loss": np.concatenate([np.zeros(0, np.uint8), *loss]),
        "lengths": np.array([len(document) for document in documents], dtype=np.int64),
    }


def _load(path: Path, name: str) -> NDArray[Any]:
    with np.load(path) as file:
        array: NDArray[Any] = file[name]
        return array


def _join(path: Path, parts: Sequence[Path], name: str, dtype: Any, length: int) -> None:
    joined = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
    start = 0
    for part in parts:
        array = _load(part, name)
        joined[start : start + len(array)] = array
        start += len(array)
    joined.flush()
