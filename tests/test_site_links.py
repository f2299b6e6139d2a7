"""Links between files of the repository survive in the site that docs/hooks.py builds."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from tests.test_layering import ROOT

PAGE = ROOT / "docs" / "support.md"
LINK = re.compile(r"(?:\]\(|\]: )([^)#\s:]*tests/[^)#\s]+)(?:#(\w+))?")


@pytest.fixture(scope="module")
def hooks() -> Any:
    """What builds the site, without mkdocs."""
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_link_to_a_test_leads_to_its_listing_in_the_site(hooks: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    pages = {hooks.place_of(path): path for path in hooks.linked_tests(text, "docs")}
    mended = hooks.mend_links(text, "docs", ".", pages.__contains__)
    links, found = LINK.findall(text), LINK.findall(mended)
    assert len(links) > 30
    assert [(f"../{pages[place]}", name) for place, name in found] == links
    listings = {place: hooks.listing(path) for place, path in pages.items()}
    assert all(not name or f"{{ #{name} }}" in listings[place] for place, name in found)
    for place, listing in listings.items():
        code = "\n".join(re.findall(r"````python\n(.*?)\n````", listing, re.DOTALL))
        assert code.split() == (ROOT / pages[place]).read_text(encoding="utf-8").split()


def test_links_to_what_the_site_lacks_keep_their_words_or_stay(hooks: Any) -> None:
    text = "[a](../Makefile) [b](gone.md)\n[c]: ../tests/gone.py#x\n"
    found = hooks.mend_links(text, "docs", ".", lambda place: False)
    assert found == "a [b](gone.md)\n[c]: ../tests/gone.py#x\n"
