"""Which tiles the products of experts take: what is not computed from the shapes is measured
(benchmarks/kernels/experts.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_ROWS = 64  # up to these, a program finds the rows of its expert by itself
_FEW_SLOTS = 512  # and up to these: registers do not hold the slots of one expert among more
PART_ROWS = 256  # up to these, the parts of a row's sum are left to the norm behind


@dataclass(frozen=True)
class Tile:
    """The tile of one program: rows, outputs (of gate, and as many of up), inputs of a step in half
    precision. turns: tiles of outputs that a program of few rows computes one after another, of
    packed weights. registers: that a thread has at most, so that more programs run at once."""

    rows: int
    outs: int
    inputs: int
    warps: int
    stages: int
    turns: int = 1
    registers: int | None = None

    def of_bytes(self, element_size: int) -> Tile:
        """The same for wider elements, in no more shared memory."""
        return replace(self, inputs=max(self.inputs * 2 // element_size, 16))


@dataclass(frozen=True)
class Tiles:
    """parts: of the sum over inputs that programs of few rows make of an output of the second
    product; the same for all few rows, so that these do not depend on each other."""

    gate_up: Tile
    down: Tile
    parts: int = 1

    def held(self, element_size: int) -> Tiles:
        """The same with no more rows than registers hold: of elements wider than 16 bits, 16 a
        warp."""
        most = 16 * min(self.gate_up.warps, self.down.warps)
        if element_size <= 2 or self.gate_up.rows <= most:
            return self
        gate_up, down = (replace(one, rows=most) for one in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)


def are_few(num_rows: int, num_chosen: int) -> bool:
    """Whether the rows are not sorted by expert before they are multiplied."""
    return num_rows <= FEW_ROWS and num_rows * num_chosen <= _FEW_SLOTS


@dataclass(frozen=True)
class TileTable:
    """few, many: least mean number of rows an expert -> tiles, the most first; of few rows, and of
    more."""

    few: tuple[tuple[float, Tiles], ...]
    many: tuple[tuple[float, Tiles], ...]

    def tiles_of(self, num_rows: int, num_experts: int, num_chosen: int) -> Tiles:
        """By the shapes alone, so that launches are the same whatever is chosen."""
        forms = self.few if are_few(num_rows, num_chosen) else self.many
        mean = num_rows * num_chosen / num_experts
        return next(tiles for least, tiles in forms if mean >= least)


_FEW_DOWN = Tile(16, 128, 64, 4, 4)
WHOLE = TileTable(
    few=(
        (2.0, Tiles(Tile(16, 32, 64, 4, 5), _FEW_DOWN)),
        (0.0, Tiles(Tile(16, 32, 128, 4, 4), _FEW_DOWN)),
    ),
    many=(
        (96.0, Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3))),
        (32.0, Tiles(Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))),
        (12.0, Tiles(Tile(32, 64, 64, 4, 4), Tile(32, 128, 64, 4, 4))),
        (0.0, Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 3))),
    ),
)
# Of weights in 8 and 4 bits; outs of gate and up together are rows of the processor's product.
PACKED = TileTable(
    few=((0.0, Tiles(Tile(16, 32, 256, 4, 3), Tile(16, 64, 256, 4, 3))),),
    many=(
        (64.0, Tiles(Tile(128, 64, 128, 8, 3), Tile(128, 128, 128, 8, 3))),
        (24.0, Tiles(Tile(64, 64, 128, 8, 3), Tile(64, 128, 128, 8, 3))),
        (10.0, Tiles(Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3))),
        (0.0, Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 3))),
    ),
)
