"""docs/support.md says what the registries and the tests say."""

from __future__ import annotations

import re

from specengine.core.registry import DRAFTERS, MODEL_FAMILIES
from tests.support.support_table import DRAFTER_TESTS, PAGE, ROOT, replace_made


def test_page_is_what_the_registries_and_tests_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_made(text), "run python -m tests.support.support_table"
    assert text.count("\n| `") >= len(MODEL_FAMILIES) + len(DRAFTERS)


def test_every_link_of_the_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert all((ROOT / "docs" / link).is_file() for link in links)


def test_drafters_with_tests_of_their_own_are_registered() -> None:
    assert DRAFTER_TESTS.keys() <= DRAFTERS.keys()
