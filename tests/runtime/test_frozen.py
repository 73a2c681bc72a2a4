"""What the garbage collector goes through while something is compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shardc.ir.gc_control import outgrown
from shardc.runtime.host import cheap_garbage_collection


class Ring:
    """Garbage that only a collection frees, once it is dropped."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_collection_leaves_out_what_was_there_before_and_takes_the_rest() -> None:
    before = Ring()
    old = weakref.ref(before)
    with cheap_garbage_collection():
        del before
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_a_block_within_one_thaws_nothing() -> None:
    with cheap_garbage_collection():
        with cheap_garbage_collection():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_a_user_froze_stays_frozen() -> None:
    gc.freeze()
    with cheap_garbage_collection():
        pass
    assert gc.get_freeze_count() > 0


def test_an_error_thaws() -> None:
    asked = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), cheap_garbage_collection():
        assert gc.get_threshold()[0] > asked[0]
        1 / 0  # noqa: B018
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == asked


def test_collections_that_a_user_switched_off_stay_off() -> None:
    asked = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with cheap_garbage_collection():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*asked)


def test_what_outgrew_its_block_is_gone_through_by_full_collections_alone() -> None:
    with outgrown():
        made = Ring()
    assert gc.isenabled() and any(each is made for each in gc.get_objects(generation=2))
    garbage = weakref.ref(made)
    del made
    gc.collect()
    assert garbage() is None and gc.get_freeze_count() == 0


def test_what_a_user_froze_outgrows_nothing() -> None:
    gc.freeze()
    with outgrown():
        pass
    assert gc.get_freeze_count() > 0
