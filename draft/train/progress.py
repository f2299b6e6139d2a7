"""How far a run is: a bar at a terminal, lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The progress of a run."""

    step: int
    max_steps: int
    share: float  # of the run, by steps or by time, 0 to 1
    seconds_left: float
    tokens_per_second: float


class Progress(Protocol):
    def update(self, place: Place) -> None:
        """After every step."""
        ...

    def show(self, place: Place, kind: str, values: Mapping[str, float]) -> None:
        """Numbers that were logged."""
        ...


class Lines:
    """A line for each entry of the log."""

    def update(self, place: Place) -> None:
        pass

    def show(self, place: Place, kind: str, values: Mapping[str, float]) -> None:
        logger.info(
            "step %d/%d %s: %s; %.0f tok/s, %s left",
            place.step,
            place.max_steps,
            kind,
            in_words(values),
            place.tokens_per_second,
            clock(place.seconds_left),
        )


class Silence:
    """For processes other than the first."""

    def update(self, place: Place) -> None:
        pass

    def show(self, place: Place, kind: str, values: Mapping[str, float]) -> None:
        pass


@contextmanager
def progress_of(name: str, is_first: bool) -> Iterator[Progress]:
    """A bar on stderr with the latest numbers, lines, or nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    if not is_first:
        yield Silence()
    elif console.is_terminal:
        with _bar(name, console) as bar:
            yield bar
    else:
        yield Lines()


@contextmanager
def _bar(name: str, console: Console) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=1.0, text="")

        class Bar:
            def update(self, place: Place) -> None:
                text = (
                    f"{place.step}/{place.max_steps}  {place.tokens_per_second:,.0f} tok/s  "
                    f"{clock(place.seconds_left)} left"
                )
                bar.update(task, completed=place.share, text=text)

            def show(self, place: Place, kind: str, values: Mapping[str, float]) -> None:
                console.print(f"step {place.step:>6} {kind:<8} {in_words(values)}")

        yield Bar()


def in_words(values: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in values.items()
    )


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
