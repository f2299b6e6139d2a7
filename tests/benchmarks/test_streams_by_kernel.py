"""Prompts, rounds and idle times of a trace: benchmarks/serving/streams_by_kernel.py."""

from __future__ import annotations

import pytest

from benchmarks.serving.streams_by_kernel import PROMPT, ROUND, shares_of
from specengine.lab.step.timeline import Span


def spans(*parts: tuple[str, float, float]) -> list[Span]:
    return [Span(name, start, end) for name, start, end in parts]


def test_prompts_are_what_a_round_takes_longer_than_usual() -> None:
    found = shares_of(
        spans(
            (ROUND, 0, 2),
            ("product", 2, 100),
            (ROUND, 100, 102),
            ("product", 102, 200),
            (f"{PROMPT}_attention", 220, 900),
            (ROUND, 900, 902),
            ("product", 902, 1000),
            (ROUND, 1000, 1100),
        )
    )
    assert found.num_rounds == 4
    assert found.round == pytest.approx(100e-6)
    assert found.prompts == pytest.approx(700e-6)
    assert found.span == pytest.approx(1100e-6)


def test_time_without_kernels_is_idle_from_five_microseconds_on() -> None:
    found = shares_of(spans((ROUND, 0, 10), ("a", 14, 20), (ROUND, 30, 40), (ROUND, 40, 50)))
    assert found.idle == pytest.approx(10e-6)


def test_a_kernel_within_another_does_not_end_it() -> None:
    found = shares_of(spans((ROUND, 0, 50), ("beside", 10, 20), ("b", 48, 60), (ROUND, 60, 70)))
    assert found.idle == 0.0


def test_prompts_before_the_first_round_count() -> None:
    prompt = (f"{PROMPT}_attention", 0, 90)
    found = shares_of(spans(prompt, (ROUND, 100, 110), ("a", 110, 200), (ROUND, 200, 210)))
    assert found.prompts == pytest.approx(100e-6)
    assert found.idle == pytest.approx(10e-6)
