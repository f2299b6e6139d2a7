"""What a data set says about itself: manifest.json."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specengine.core.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
FILES = ("tokens.npy", "offsets.npy", "loss.npy")
HELD_OUT_RULE = (
    "a document is held out where the first 8 bytes of blake2b(its token ids as little-endian "
    "uint32, key = the seed as little-endian int64), read as a big-endian fraction of 1, lie below "
    "the fraction asked for"
)


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Whose words the documents are. Hashes are SHA-256; chat_template's is that of "" for none."""

    name: str
    weights: str
    tokenizer: str
    chat_template: str
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    target: TargetIdentity
    seed: int
    made: dict[str, Any]  # the configuration that made it, and what else is worth knowing
    counts: dict[str, int]  # documents, tokens, answer_tokens, and what was dropped, by reason
    sha256: dict[str, str]  # of FILES
    format: int = FORMAT
    held_out_rule: str = field(default=HELD_OUT_RULE)

    @property
    def data_sha256(self) -> str:
        """One hash for all the files: what results name their data by."""
        return hashlib.sha256("".join(self.sha256[name] for name in FILES).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Written last, and in one piece: a directory without it is no data set yet."""
        write_atomically(directory / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises DataError where there is none, or none of this format."""
        path = directory / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(
                f"{directory} is no finished data set: it has no {MANIFEST}; make one with "
                "`specengine data make`"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        return cls._from_json(values, path)

    @classmethod
    def _from_json(cls, values: Any, path: Path) -> Manifest:
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise DataError(f"{path} has format {found!r}, and this version reads format {FORMAT}")
        try:
            known = {one.name: values[one.name] for one in fields(cls)}
            return cls(**(known | {"target": TargetIdentity(**values["target"])}))
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}") from error


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """The file is there whole or not at all, whenever the process or the machine stops."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
