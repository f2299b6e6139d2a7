"""How far the making of a data set is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from specengine.lab.generate.batch_writer import BatchWriter
from specengine.lab.generate.config import GenerationConfig

_TERMINAL_SECONDS = 0.5


class Pace:
    """Rates and time left, from looks at a batch writer."""

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self._start = self._last = monotonic()
        self._generated = 0

    @property
    def seconds_since_look(self) -> float:
        return monotonic() - self._last

    def look(self, written: BatchWriter) -> str:
        now = monotonic()
        generated = written.driver.engine.scheduler.num_generated_tokens
        rate = (generated - self._generated) / max(now - self._last, 1e-6)
        self._generated, self._last = generated, now
        return (
            f"{written.num_answer_tokens:,} answer tokens kept, {written.num_conversations:,} "
            f"conversations, {rate:,.0f} tokens/s, {self._left(written)}"
        )

    def share_done(self, written: BatchWriter) -> float:
        """0 to 1, by the bound that is nearest."""
        config = self._config
        shares = [0.0]
        if config.max_minutes is not None:
            shares.append((self._last - self._start) / (60 * config.max_minutes))
        if config.max_tokens is not None:
            shares.append(written.num_answer_tokens / config.max_tokens)
        if config.max_conversations is not None:
            shares.append(written.num_conversations * config.num_shards / config.max_conversations)
        return min(max(shares), 1.0)

    def _left(self, written: BatchWriter) -> str:
        elapsed, share = self._last - self._start, self.share_done(written)
        return f"{_clock(elapsed / share - elapsed)} left" if share else f"{_clock(elapsed)} gone"


@contextmanager
def report(config: GenerationConfig) -> Iterator[Callable[[BatchWriter], None]]:
    """Yields what to call after every forward: it keeps a bar on stderr up to date at a terminal,
    and prints a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    pace, console = Pace(config), Console(stderr=True)
    every = _TERMINAL_SECONDS if console.is_terminal else config.report_seconds
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def watch(written: BatchWriter) -> None:
            if pace.seconds_since_look < every:
                return
            line = pace.look(written)
            bar.update(task, completed=pace.share_done(written), description=line)
            if not console.is_terminal:
                console.print(line, soft_wrap=True, highlight=False)

        yield watch


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
