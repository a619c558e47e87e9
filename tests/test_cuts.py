"""Cutting a sorted batch: the optimum is the best of all cuts, and it follows the cost that was learned."""

import itertools
import random

import pytest

from headway.workers.cuts import CELLS_MAX, Cutter, best_cut, equal_cut

MS = 1_000_000


def cost(lengths: list[int], sizes: list[int], fixed: float, per_cell: float) -> float:
    total, at = 0.0, 0
    for size in sizes:
        at += size
        total += fixed + per_cell * size * lengths[at - 1]
    return total


def all_cuts(count: int) -> list[list[int]]:
    """The oracle's search: each way to cut `count` things in a row."""
    return [
        [b - a for a, b in itertools.pairwise([0, *bounds, count])]
        for parts in range(count)
        for bounds in itertools.combinations(range(1, count), parts)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted(rng.randint(1, rng.choice([4, 40, 200])) for _ in range(rng.randint(1, 9)))
    fixed, per_cell = rng.choice([0.0, 1.0, 30.0, 1000.0]), rng.choice([0.0, 0.1, 1.0])
    sizes = best_cut(lengths, fixed, per_cell)
    assert sum(sizes) == len(lengths)
    least = min(cost(lengths, other, fixed, per_cell) for other in all_cuts(len(lengths)))
    assert cost(lengths, sizes, fixed, per_cell) == pytest.approx(least)


def test_a_rectangle_has_a_largest_size() -> None:
    assert best_cut([10] * 7, 1e9, 1.0, cells_max=30) == [3, 2, 2]
    assert best_cut([10, 500], 0.0, 1.0, cells_max=30) == [1, 1]  # longer than that: alone
    assert best_cut([], 1.0, 1.0) == []
    assert best_cut([16] * 8192, 1e9, 1.0) == [4096, 4096]


def test_without_padding_each_length_is_alone() -> None:
    assert equal_cut([3, 3, 5, 6, 6, 6]) == [2, 1, 3]


def learned(fixed_ns: float, per_cell_ns: float) -> Cutter:
    """A cutter that has seen many rectangles of this cost."""
    rng = random.Random(1)
    cutter = Cutter((1e6, 1e6, 0.0))  # its first guess is wrong for either device
    for _ in range(200):
        rows, width = rng.randint(1, 12), rng.randint(5, 200)
        cutter.observe(rows, width, int((fixed_ns + per_cell_ns * rows * width) * rng.uniform(0.95, 1.05)))
    return cutter


def test_groups_are_small_where_padding_costs_and_large_where_a_launch_does() -> None:
    rng = random.Random(2)
    lengths = [rng.randint(5, 140) for _ in range(32)]
    slow = learned(7.0 * MS, 0.27 * MS).cut(lengths)  # MiniLM on one core
    quick = learned(9.0 * MS, 0.0004 * MS).cut(lengths)  # a launch-bound GPU
    assert 5 <= len(slow) <= 12
    assert len(quick) == 1
    for groups in (slow, quick):
        assert sorted(itertools.chain(*groups)) == list(range(32))
        ordered = [lengths[place] for group in groups for place in group]
        assert ordered == sorted(lengths)


def test_equal_lengths_keep_the_order_of_arrival() -> None:
    assert Cutter((1e9, 1.0, 0.0)).cut([5, 3, 5, 3]) == [[1, 3, 0, 2]]


def test_memory_that_ran_out_makes_rectangles_smaller_and_they_grow_again_slowly() -> None:
    cutter = Cutter((1e9, 1.0, 0.0))
    lengths = [100] * 8
    assert len(cutter.cut(lengths)) == 1
    cutter.out_of_memory(8, 100)
    assert [len(group) for group in cutter.cut(lengths)] == [4, 4]
    assert "at most 400 cells" in repr(cutter)
    for _ in range(40):
        cutter.observe(4, 100, MS)
    assert [len(group) for group in cutter.cut(lengths)] == [4, 4]
    for _ in range(30):
        cutter.observe(4, 100, MS)
    assert len(cutter.cut(lengths)) == 1
    for _ in range(1000):
        cutter.observe(4, 100, MS)
    assert cutter.cells_max == CELLS_MAX
