"""Whether a kernel compiled for Hopper overwrites weights that a running product still reads.

A wgmma whose first operand lies in registers reads them until WARPGROUP.DEPBAR has waited for it.
ptxas before CUDA 13.3, Triton 3.6's among them, gives such registers to what comes before the wait
(triton-lang/triton, issue 9433)."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\d+\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_STORES = ("ST", "BAR", "RED", "ATOM", "WARP", "DEPBAR", "FENCE", "MEMBAR", "LDGSTS", "UTMA", "NOP")


@dataclass(frozen=True)
class Instruction:
    place: str
    is_conditional: bool
    name: str
    operands: Sequence[str]

    def written(self) -> set[int]:
        """Registers, of widths as the name says them."""
        first = re.match(r"R(\d+)\b", self.operands[0] if self.operands else "")
        if first is None or self.name.startswith(_STORES):
            return set()
        wide = ".64" in self.name or self.name.startswith("IMAD.WIDE")
        count = 4 if ".128" in self.name or ".M88.4" in self.name else 2 if wide else 1
        return set(range(int(first[1]), int(first[1]) + count))


@dataclass
class Program:
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cubin: bytes) -> Program:
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [str(Path(knobs.nvidia.nvdisasm.path)), "-c", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made = cls()
        for line in text.splitlines():
            if label := _LABEL.match(line):
                made.labels[label[1]] = len(made.instructions)
            elif found := _LINE.match(line):
                operands = [one.strip() for one in found[4].split(",")]
                made.instructions.append(
                    Instruction(found[1], found[2] is not None, found[3], operands)
                )
        return made


def overwritten(cubin: bytes) -> list[str]:
    """The instructions that write what a running wgmma reads, along every way to its wait. That
    there are none is noted by the digest of the code and of this file where SPECENGINE_CACHE_DIR is
    set: nvdisasm takes half a second a kernel."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + cubin).hexdigest()
    folder = os.environ.get("SPECENGINE_CACHE_DIR")
    note = None if folder is None else Path(folder, "wgmma-waits", digest)
    if note is not None and note.exists():
        return []
    found = _overwritten(cubin)
    if note is not None and not found:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return found


def _overwritten(cubin: bytes) -> list[str]:
    program, found, seen = Program.of(cubin), list[str](), set[tuple[int, frozenset[int]]]()
    ways = [
        (at, frozenset[int]())
        for at, one in enumerate(program.instructions)
        if one.name.startswith("WARPGROUP.ARRIVE")
    ]
    while ways:
        at, read = ways.pop()
        if at >= len(program.instructions) or (at, read) in seen:
            continue
        seen.add((at, read))
        one = program.instructions[at]
        if one.name.startswith("HGMMA"):
            if first := re.match(r"R(\d+)", one.operands[1]):
                read |= set(range(int(first[1]), int(first[1]) + 4))
        elif one.name.startswith("WARPGROUP.DEPBAR"):
            continue
        elif one.written() & read:
            found.append(f"{one.place} {one.name} {', '.join(one.operands)}")
        if one.name.startswith("BRA"):
            target = re.search(r"\.L_x_\d+", ",".join(one.operands))
            assert target is not None
            ways.append((program.labels[target[0]], read))
        if one.is_conditional or not one.name.startswith(("BRA", "EXIT")):
            ways.append((at + 1, read))
    return found
