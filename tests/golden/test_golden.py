"""Rounds do what they did when the golden traces were recorded (record.py)."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.cases import (
    FEATURES,
    KINDS,
    LOOKUP,
    MODELS,
    PLAIN,
    RULES,
    SAMPLED_RULES,
)
from tests.golden.models import Models
from tests.golden.play import FILE, PLACES, differences, engine_of, fingerprint, load, play

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="recorded on a CPU")
TRACES = load()


def _is_fast(kind: str) -> bool:
    """Every fourth rule of each source and layout, by turns; of text, which has few rules, every
    third. Plain decoding always."""
    if kind == PLAIN:
        return True
    source, _, rule = kind.rpartition("/")
    sources, rules = [*(LOOKUP | MODELS)], [*(RULES | SAMPLED_RULES)]
    return (sources.index(source) + rules.index(rule)) % (3 if source in LOOKUP else 4) == 0


def _cases() -> list[Any]:
    """In `make test` one feature of each of these kinds, in a device's round or, of every third of
    these, in a host's; the others are slow."""
    found, turns = [], Counter[str]()
    for kind, places in TRACES["kinds"].items():
        on_host = turns.total() % 3 == 0 or "device" not in places
        for place in [name for name in PLACES if name in places]:
            names = [*places[place]]
            if _is_fast(kind) and (place == "host") == on_host:
                fast = names.pop(turns[place] % len(names))
                found.append(pytest.param(kind, place, (fast,)))
                turns[place] += 1
            found.append(pytest.param(kind, place, (*names,), marks=pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(("kind", "place", "features"), _cases())
def test_rounds_do_what_was_recorded(
    kind: str, place: str, features: tuple[str, ...], models: Models
) -> None:
    is_same, found = TRACES["fingerprint"] == fingerprint(), list[str]()
    with engine_of(KINDS[kind], place, models) as llm:
        for name in features:
            recorded = TRACES["kinds"][kind][place][name]
            again = play(llm, place, name, recorded["seed"])
            found += differences(recorded, again, is_same, name)
    assert not found, "\n".join(found)


def test_each_kind_is_recorded_with_each_feature() -> None:
    assert TRACES["kinds"].keys() == KINDS.keys()
    for places in TRACES["kinds"].values():
        assert places["host"].keys() == FEATURES.keys()
        assert places.get("device", places["host"]).keys() == FEATURES.keys()
        assert ("device" in places) != ("refused" in places)
    fast = [one.values for one in _cases() if not one.marks]
    parts = {kind.rpartition("/")[::2] for kind, _, _ in fast}
    assert {source for source, _ in parts} == {*LOOKUP, *MODELS, "none/chain"}
    assert {rule for _, rule in parts} == {*RULES, *SAMPLED_RULES}
    met = {(place, name) for _, place, names in fast for name in names}
    assert met == {(place, name) for place in PLACES for name in FEATURES}
    assert FILE.stat().st_size < 300_000


def test_traces_meet_drafts_that_stand_and_that_fall() -> None:
    """In each kind but plain decoding, both on the host and on the device."""
    for kind, places in TRACES["kinds"].items():
        for place in PLACES:
            if place not in places or kind.startswith("none/"):
                continue
            choices = [one for x in places[place].values() for one in x["choices"].values()]
            rounds = [one for each in choices for one in each["rounds"]]
            assert sum(stood for stood, _ in rounds) > 10, (kind, place)
            assert any(stood < min(drafted, 3) for stood, drafted in rounds), (kind, place)
            assert place == "host" or all(x["on_device"] for x in places[place].values())


KIND, FEATURE = "EAGLE3/chain/block (sampled)", "logprobs"


def flip_token(choice: dict[str, Any]) -> None:
    choice["tokens"][-1] += 1


def flip_accept(choice: dict[str, Any]) -> None:
    choice["rounds"][0][0] += 1


def lose_round(choice: dict[str, Any]) -> None:
    choice["rounds"].pop()


def end_otherwise(choice: dict[str, Any]) -> None:
    choice["finish"][0] = "abort"


def move_logprob(choice: dict[str, Any]) -> None:
    choice["logprobs"][3][1] += 2e-4


@pytest.mark.parametrize(
    "spoil", [flip_token, flip_accept, lose_round, end_otherwise, move_logprob]
)
@pytest.mark.parametrize("is_same_machine", [True, False])
def test_one_change_of_a_trace_is_reported(spoil: Any, is_same_machine: bool) -> None:
    recorded = TRACES["kinds"][KIND]["device"][FEATURE]
    found = deepcopy(recorded)
    assert not differences(recorded, found, is_same_machine)
    spoil(found["choices"]["0#0"])
    (told,) = differences(recorded, found, is_same_machine, FEATURE)
    assert told.startswith(f"{FEATURE}/choices/0#0/")


def test_the_last_bit_of_a_logprob_is_reported_on_the_same_machine_alone() -> None:
    recorded = TRACES["kinds"][KIND]["host"][FEATURE]
    found = deepcopy(recorded)
    row = found["choices"]["0#0"]["logprobs"][0]
    row[1] = float(torch.nextafter(torch.tensor(row[1]), torch.tensor(1.0)))
    assert not differences(recorded, found, is_same_machine=False)
    assert differences(recorded, found, is_same_machine=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_drafter_of_other_weights_is_reported(place: str, tmp_path: Path) -> None:
    """The text stays, the rounds do not."""
    kind, other = "EAGLE3/chain/match", Models(tmp_path, noise=0.2, only="tiny-eagle3")
    recorded = TRACES["kinds"][kind][place]["greedy"]
    with engine_of(KINDS[kind], place, other) as llm:
        found = play(llm, place, "greedy", recorded["seed"])
    told = differences(recorded, found, is_same_machine=True)
    assert told
    assert not any("/tokens" in one for one in told)
