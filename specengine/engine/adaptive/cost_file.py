"""The file of --speculative-cost-table: what rounds cost, from one start to the next."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.paths import user_path
from specengine.engine.adaptive.costs import (
    ContextCost,
    Costs,
    Curve,
    StepCosts,
    ascending,
)

logger = logging.getLogger(__name__)

Facts = dict[str, object]  # what a table holds for, as JSON

_FACTS = "measured_for"  # keys of the file
_MEASURED_IN = "measured_in_seconds"
_COSTS = ("seconds", "smaller_trees", "reading")
_EXAMPLE = '{"seconds": {"1": {"0": 0.0031, "3": 0.0042}, "8": {"0": 0.0033, "3": 0.0047}}}'


def read_table(path: Path) -> StepCosts:
    """A file is a JSON object: `seconds` maps batch sizes to objects that map num_steps to seconds,
    0 (plain decoding) and at least one more in each. `smaller_trees` may map numbers of nodes to
    more such objects, in which 0 may be missing. `reading` may have `tokens`, a context length, and
    `seconds` as above, that a round takes longer for it. Other keys are kept as notes.

    Raises ConfigError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        smaller = raw.get("smaller_trees", {}) if "seconds" in raw else {}
        sizes = {int(nodes): _numbers(curves) for nodes, curves in smaller.items()}
        context_cost = None
        if "reading" in raw:
            tokens, seconds = int(raw["reading"]["tokens"]), _numbers(raw["reading"]["seconds"])
            context_cost = ContextCost(tokens, ascending(seconds))
        table = StepCosts(_numbers(raw["seconds"]), sizes, context_cost=context_cost)
        table.notes = {key: value for key, value in raw.items() if key not in _COSTS}
        return table
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--speculative-cost-table {path}: no table of round costs ({error}); it looks "
            f"like {_EXAMPLE}, in seconds by batch size and num_steps; mend it, or delete it "
            "to have one made"
        ) from error


def write_table(table: StepCosts, path: Path) -> None:
    """Whole or not at all: what was there before stays if this fails. Raises OSError."""
    path = path.resolve()  # a link stays one
    given = {**table.notes, "seconds": table.seconds, "smaller_trees": table.smaller_trees}
    if table.context_cost is not None:
        given["reading"] = asdict(table.context_cost)
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        half.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _numbers(raw: Mapping[str, Mapping[str, float]]) -> dict[int, Curve]:
    return {
        int(size): {int(steps): float(value) for steps, value in curve.items()}
        for size, curve in raw.items()
    }


class CostFile:
    """A table without `measured_for` was written by hand: it holds for all engines and is never
    overwritten. A table that an engine has written holds for what it was measured for only. Call
    `add_facts` before a table is read or kept.
    """

    def __init__(self, path: Path, table: StepCosts | None) -> None:
        """table: None while there is no file."""
        self.path = path
        self.table = table
        self.facts: Facts = {}  # of this engine, as far as they are known

    @classmethod
    def of(cls, spec: SpecConfig) -> CostFile | None:
        """None without --speculative-cost-table, and where depth is fixed. Raises ConfigError where
        a file can neither be read nor made."""
        if spec.cost_table is None or spec.algorithm is None or not spec.adaptive:
            return None
        path = user_path(spec.cost_table)
        try:
            if not path.exists():
                with tempfile.TemporaryFile(dir=path.resolve().parent):
                    return cls(path, None)
        except OSError as error:
            raise ConfigError(
                f"{_named(path)}: there is no such file, and none can be made there "
                f"({error.strerror or error}); name one in a folder that can be written"
            ) from error
        table = read_table(path)
        if not isinstance(table.notes.get(_FACTS, {}), dict):
            raise ConfigError(f"{_named(path)}: {_FACTS} is no JSON object; delete the file")
        return cls(path, table)

    @property
    def by_hand(self) -> StepCosts | None:
        """A table that was written by hand."""
        is_ours = self.table is not None and _FACTS in self.table.notes
        return None if is_ours else self.table

    def add_facts(self, more: Facts) -> None:
        """more: facts beside `facts`, the last ones. Raises ConfigError for a table that was
        measured for something else."""
        self.facts = json.loads(json.dumps({**self.facts, **more}))
        if self.table is None or self.by_hand is not None:
            return
        then = self.table.notes[_FACTS]
        assert isinstance(then, dict)
        if then != self.facts:
            raise ConfigError(
                f"{_named(self.path)} was measured for something else: "
                f"{_differences(then, self.facts)}; delete the file to have it measured anew, or "
                "name another"
            )

    def read_or(self, measure: Callable[[], StepCosts]) -> StepCosts:
        """The table of the file; without one, a table that is measured now and kept."""
        if self.table is not None:
            saved = self.table.notes.get(_MEASURED_IN)
            what = "" if saved is None else f", which saves {saved} s of measuring"
            logger.info("round costs: read from %s%s", self.path, what)
            return self.table
        start = perf_counter()
        table = measure()
        took = round(perf_counter() - start, 1)
        logger.info("round costs: measured in %.1f s", took)
        self._keep(table, {_MEASURED_IN: took})
        return table

    def start(self, costs: Costs) -> None:
        """Learned costs start from the table of the file, if there is one."""
        if not costs.is_fixed and self.table is not None:
            costs.start_from(self.table)
            logger.info("round costs: what was learned before, from %s", self.path)

    def keep_learned(self, costs: Costs) -> None:
        table = costs.learned()
        if table is None:
            logger.info("round costs: too few rounds have run to keep anything in %s", self.path)
        else:
            self._keep(table, {})

    def _keep(self, table: StepCosts, notes: dict[str, object]) -> None:
        """A failure to write is logged: serving goes on."""
        table.notes = {_FACTS: self.facts, **notes}
        try:
            write_table(table, self.path)
            logger.info("round costs: kept in %s for the next start", self.path)
        except OSError as error:
            logger.warning("round costs are not kept: cannot write %s (%s)", self.path, error)


def _named(path: Path) -> str:
    return f"--speculative-cost-table {path}"


def _differences(then: Facts, now: Facts) -> str:
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in names)
