"""What exists when an engine begins to serve is passed over; what comes later is not."""

from __future__ import annotations

import gc
import weakref

import pytest

from specengine.engine.garbage import frozen_objects, importing


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.knot = self


def test_only_what_comes_later_is_looked_at() -> None:
    gc.unfreeze()  # the suite's own
    standing = len(gc.get_objects())
    with frozen_objects():
        assert len(gc.get_objects()) < standing // 2
        later = weakref.ref(Knot())
        gc.collect()
        assert later() is None


def test_what_was_there_is_looked_at_again_afterwards() -> None:
    before = Knot()
    seen = weakref.ref(before)
    with frozen_objects():
        del before
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


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
