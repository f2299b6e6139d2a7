"""The file of --speculative-cost-table: what rounds cost, from one start to the next."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine.adaptive.cost_table import Costs, StepCosts
from specengine.engine.adaptive.running_costs import RunningCosts

logger = logging.getLogger(__name__)

Facts = dict[str, object]  # what a table holds for, as JSON

_FACTS = "measured_for"  # keys of the file
_SECONDS = "measured_in_seconds"


class CostFile:
    """A table without `measured_for` was written by hand: it holds for whatever runs, and is left
    alone. The engine's own tables hold for what they were measured for, and nothing else.

    `settle` must come before anything is read or kept.
    """

    def __init__(self, path: Path, table: StepCosts | None) -> None:
        """table: None where there is no file yet."""
        self.path = path
        self._table = table
        self.facts: Facts = {}  # what tables of this engine hold for, as far as is known

    @classmethod
    def of(cls, spec: SpecConfig) -> CostFile | None:
        """None where nobody asks for one. Raises ConfigError where it can neither be read nor
        made."""
        if spec.cost_table is None or spec.algorithm is None or not spec.adaptive:
            return None
        path = Path(spec.cost_table).expanduser()
        try:
            if not path.exists():
                with tempfile.TemporaryFile(dir=path.resolve().parent):
                    return cls(path, None)
        except OSError as error:
            raise ConfigError(
                f"{_named(path)}: there is no such file, and none can be made there "
                f"({error.strerror or error}); name one in a folder that can be written"
            ) from error
        table = StepCosts.read(path)
        if not isinstance(table.notes.get(_FACTS, {}), dict):
            raise ConfigError(f"{_named(path)}: {_FACTS} is no JSON object; delete the file")
        return cls(path, table)

    @property
    def by_hand(self) -> StepCosts | None:
        """For all rounds."""
        is_ours = self._table is not None and _FACTS in self._table.notes
        return None if is_ours else self._table

    @property
    def tells(self) -> bool:
        """Whether there is a table."""
        return self._table is not None

    def settle(self, more: Facts) -> None:
        """The last of the facts. Raises ConfigError where the table that is there was measured for
        something else."""
        self.facts = json.loads(json.dumps({**self.facts, **more}))
        if self._table is None or self.by_hand is not None:
            return
        then = self._table.notes[_FACTS]
        assert isinstance(then, dict)
        if then != self.facts:
            raise ConfigError(
                f"{_named(self.path)} was measured for something else: "
                f"{_differences(then, self.facts)}; delete the file to have it measured anew, or "
                "name another"
            )

    def read_or(self, measure: Callable[[], StepCosts]) -> StepCosts:
        """The table that is there; else one that is measured now, and kept."""
        if self._table is not None:
            saved = self._table.notes.get(_SECONDS)
            what = "" if saved is None else f", which saves {saved} s of measuring"
            logger.info("round costs: read from %s%s", self.path, what)
            return self._table
        start = perf_counter()
        table = measure()
        took = round(perf_counter() - start, 1)
        logger.info("round costs: measured in %.1f s", took)
        self._keep(table, {_SECONDS: took})
        return table

    def start(self, costs: Costs) -> None:
        """From what earlier rounds have taught; rounds go on to teach."""
        if isinstance(costs, RunningCosts) and self._table is not None:
            costs.start_from(self._table)
            logger.info("round costs: what was learned before, from %s", self.path)

    def keep_learned(self, costs: RunningCosts) -> None:
        table = costs.table()
        if table is None:
            logger.info("round costs: too few rounds have run to keep anything in %s", self.path)
        else:
            self._keep(table, {})

    def _keep(self, table: StepCosts, notes: dict[str, object]) -> None:
        """What cannot be written is no reason to stop serving."""
        table.notes = {_FACTS: self.facts, **notes}
        try:
            table.write(self.path)
            logger.info("round costs: kept in %s for the next start", self.path)
        except OSError as error:
            logger.warning("round costs are not kept: cannot write %s (%s)", self.path, error)


def _named(path: Path) -> str:
    return f"--speculative-cost-table {path}"


def _differences(then: Facts, now: Facts) -> str:
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in names)
