"""All that jobs wrote, in one file."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

MOST_BYTES = 8 << 20  # of a file; of a larger one the end is kept, as NAME.end
PART = 15 << 20  # bytes of a file that comes back whole


def pack(folder: Path, target: Path) -> int:
    """Replace target, a .tar.xz, by the files of a folder, at once: who reads it finds the old one
    or the new one. Files may be written meanwhile. Returns the archive's bytes."""
    partial = target.with_name(f".{target.name}.partial")
    with tarfile.open(partial, "w:xz", preset=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                _add(archive, path, str(path.relative_to(folder)))
    os.replace(partial, target)
    return target.stat().st_size


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - MOST_BYTES))
            data = file.read(MOST_BYTES)
    except FileNotFoundError:
        return
    entry = tarfile.TarInfo(name + ".end" if size > MOST_BYTES else name)
    entry.size, entry.mtime = len(data), int(path.stat().st_mtime) if path.exists() else 0
    archive.addfile(entry, io.BytesIO(data))


def parts_of(archive: Path, part: int = PART) -> list[Path]:
    """The archive, or where it is larger than a part, the parts that it is cut into: NAME.0,
    NAME.1 … Joined they are the archive, which is removed."""
    data = archive.read_bytes()
    if len(data) <= part:
        return [archive]
    found = []
    for number, start in enumerate(range(0, len(data), part)):
        found.append(archive.with_name(f"{archive.name}.{number}"))
        found[-1].write_bytes(data[start : start + part])
    archive.unlink()
    return found
