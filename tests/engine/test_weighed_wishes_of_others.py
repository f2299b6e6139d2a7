"""Edits of logits, logprobs and grammars where trees of text, or of a smaller model, are weighed,
in rounds on the device alone: a seed says what it says on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specengine import SpecConfig
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import let_fly as allow
from tests.engine.test_graph_round import make
from tests.engine.test_graph_weighed import ON_CPU, fallbacks, flags
from tests.engine.test_graph_weighed_tree import RULES, with_rule
from tests.engine.test_standalone_trees import Folders, specs_of
from tests.engine.test_weighed_text_trees import SPECS
from tests.engine.test_weighed_tree_wishes import shortened
from tests.engine.test_weighed_wishes import ALSO, WISHES, check
from tests.halves import thinned


def trees_of(folders: Folders) -> dict[str, SpecConfig]:
    found = {f"{name}, target_only": SPECS[name] for name in ("NGRAM", "SUFFIX")}
    spec = replace(specs_of(folders)["3"], adaptive=True)
    return found | {f"STANDALONE, {rule}": with_rule(spec, rule) for rule in RULES}


NAMES = ["NGRAM, target_only", "SUFFIX, target_only", *(f"STANDALONE, {rule}" for rule in RULES)]


@ON_CPU
@pytest.mark.parametrize(("name", "wish"), thinned(2, NAMES, WISHES))
def test_wishes_fly(
    name: str, wish: str, target: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, more = trees_of(folders)[name], flags(context_length=160)
    host, llm = (make(target, spec, **more) for _ in range(2))
    allow(llm)
    flying = let_fly(llm, monkeypatch, most=8)
    check(host, llm, shortened(WISHES[wish]))
    assert not fallbacks(flying)
    assert flying.counters["replays"] > 10
    assert ALSO[wish] in {form.choosing for form in flying.captured if form.num_steps}
