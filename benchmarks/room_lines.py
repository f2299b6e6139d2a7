"""Lines of Python by room, beside what the rebuild around one round aimed at. Rewrites the table of
CONTRIBUTING.md.

    python benchmarks/room_lines.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- room_lines: begin -->\n", "<!-- room_lines: end -->\n"


@dataclass(frozen=True)
class Room:
    """folders and without: below the repository. before: lines when the rebuild began. why: of
    what is over the budget, in a few words."""

    name: str
    folders: tuple[str, ...]
    without: tuple[str, ...]
    before: int
    budget: int
    why: str

    @property
    def lines(self) -> int:
        return sum(path.read_text().count("\n") for path in self._files())

    def _files(self) -> Iterator[Path]:
        left_out = [ROOT / one for one in self.without]
        for folder in self.folders:
            for path in (ROOT / folder).rglob("*.py"):
                if not any(path.is_relative_to(one) for one in left_out):
                    yield path


ROOMS = (
    Room(
        "engine, without proof and tracing",
        ("specengine/engine",),
        ("specengine/engine/proof", "specengine/engine/tracing"),
        8400,
        5600,
        "never reached: 8,600 when the rebuild ended. A quarter of it is `round/` (a round that "
        "runs captured, with grammars, logprobs and lookup), a seventh `adaptive/`. Since then "
        "`serving/` (an engine in a process of its own), `parallel/` (ranks), prefills that are "
        "split, sleep, new weights, pooling",
    ),
    Room(
        "runner",
        ("specengine/runner",),
        (),
        4750,
        3900,
        "5,000 when the rebuild ended, for FlashAttention and graphs of prompts; since then "
        "communicators, quantised checkpoints, attention backends by phase",
    ),
    Room(
        "core",
        ("specengine/core",),
        (),
        2500,
        2150,
        "options of serving, ranks and quantisation, what ranks share, memory that sleeps; the "
        "limits that refuse what is not computed",
    ),
    Room(
        "draft, without train, trace and replay",
        ("draft",),
        ("draft/train", "draft/trace", "draft/replay"),
        5200,
        4100,
        "converters and forms of published checkpoints, token maps",
    ),
    Room(
        "target", ("target",), (), 930, 650, "from 5 families to 42, in 34 files of some 85 lines"
    ),
    Room(
        "layers, memory, scheduler",
        ("specengine/layers", "specengine/memory", "specengine/scheduler"),
        (),
        2910,
        2900,
        "experts, quantised linear layers, layers of ranks",
    ),
    Room(
        "kernels, Python",
        ("kernels",),
        (),
        10430,
        9300,
        "experts (MXFP4 too), 2,500 lines, FP8 and INT linear layers; `accept/` still has a file "
        "for each rule's reference and kernel",
    ),
    Room(
        "tests of the engine room",
        ("tests/engine",),
        (),
        15000,
        7500,
        "the pairwise matrix is in `make test`, the whole product in `make test-all`; tests of "
        "ranks and serving came since",
    ),
)


def table() -> str:
    rows = ["| room | before | budget | now | why it is over |", "|---|---|---|---|---|"]
    for room in ROOMS:
        now = room.lines
        why = room.why if now > room.budget else ""
        rows.append(f"| {room.name} | {room.before:,} | {room.budget:,} | {now:,} | {why} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
