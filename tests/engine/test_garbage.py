"""What exists when an engine begins to serve is passed over; what comes later is not. In processes
of their own, which have few objects to look through."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from specengine.engine.garbage import importing

KNOT = """
import gc
import weakref
from specengine.engine.garbage import frozen_objects

class Knot:
    # Refers to itself, so that only a collection frees it.
    def __init__(self):
        self.knot = self

"""
LATER = """
standing = len(gc.get_objects())
with frozen_objects():
    assert len(gc.get_objects()) < standing // 2
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None
"""
BEFORE = """
before = Knot()
seen = weakref.ref(before)
with frozen_objects():
    del before
    gc.collect()
    assert seen() is not None
gc.collect()
assert seen() is None
"""


def run(script: str) -> None:
    where = Path(__file__).parents[2]
    given = [sys.executable, "-c", KNOT + script + "print('to its end')"]
    done = subprocess.run(given, capture_output=True, text=True, check=False, cwd=where)
    assert done.stdout == "to its end\n", done.stderr


def test_only_what_comes_later_is_looked_at() -> None:
    run(LATER)


def test_what_was_there_is_looked_at_again_afterwards() -> None:
    run(BEFORE)


def test_imports_collect_nothing_and_collections_go_on_afterwards() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_import_amid_another_leaves_the_outer_one_alone() -> None:
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
