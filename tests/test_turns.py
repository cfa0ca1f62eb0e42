"""Tests share a GPU or have it alone, and who waits to be alone is not overtaken."""

import threading

from equivalence import conftest
from equivalence.turns import Turns


class Taker:
    """A thread that takes a turn; each has its own open files, as a process would."""

    def __init__(self, folder, alone: bool):
        self.turns, self.inside = Turns("gpu", str(folder)), threading.Event()
        threading.Thread(target=self._take, args=(alone,), daemon=True).start()

    def _take(self, alone: bool) -> None:
        self.turns.take(alone)
        self.inside.set()

    def waits(self) -> bool:
        return not self.inside.wait(0.3)

    def enters(self) -> bool:
        return self.inside.wait(10)


def test_turns(tmp_path):
    first, second = Taker(tmp_path, False), Taker(tmp_path, False)
    assert first.enters() and second.enters()
    alone = Taker(tmp_path, True)
    assert alone.waits()
    late = Taker(tmp_path, False)
    assert late.waits(), "it came after one that waits to be alone"
    first.turns.give()
    assert alone.waits(), "one is still there"
    second.turns.give()
    assert alone.enters() and late.waits()
    alone.turns.give()
    assert late.enters()
    other = Turns("another", str(tmp_path))
    other.take(alone=True)  # of another GPU


def test_tests_that_measure_time_come_first():
    class Item:
        def __init__(self, *marks):
            self.get_closest_marker = lambda name: name if name in marks else None
            self.fixturenames = ["gpu"]

    items = shared, table, other, hang = [Item(), Item("alone"), Item("slow"), Item("slow", "alone")]
    conftest.pytest_collection_modifyitems(items)
    assert items == [table, hang, shared, other]
