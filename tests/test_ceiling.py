"""The learned ceiling: down by half, up by a little, and only for what says something about it."""

from headway.workers.ceiling import PATIENCE, RISES, Ceiling


def test_a_shortage_halves_below_what_did_not_fit() -> None:
    ceiling = Ceiling(256)
    assert [ceiling.short(200), ceiling.short(100), ceiling.short(30)] == [100, 50, 15]
    assert [ceiling.short(1), ceiling.short(1)] == [1, 1]
    assert (ceiling.shortages, repr(ceiling)) == (5, "<Ceiling 1/256, 5 shortages>")


def test_it_rises_by_steps_of_its_own_size_and_says_when_it_is_back() -> None:
    ceiling = Ceiling(256)
    ceiling.short(256)
    seen = [ceiling.held(ceiling.limit) for _ in range(PATIENCE * RISES // 2)]
    assert (ceiling.limit, seen.index(True)) == (256, PATIENCE * RISES // 2 - 1)
    assert not ceiling.held(256)


def test_small_ones_prove_nothing() -> None:
    ceiling = Ceiling(64)
    ceiling.short(64)
    assert not any(ceiling.held(15) for _ in range(10 * PATIENCE))
    assert ceiling.limit == 32
    for _ in range(PATIENCE):
        ceiling.held(16)
    assert ceiling.limit == 34


def test_a_shortage_starts_the_count_anew() -> None:
    ceiling = Ceiling(64)
    ceiling.short(64)
    for _ in range(PATIENCE - 1):
        ceiling.held(32)
    ceiling.short(32)
    ceiling.held(16)
    assert ceiling.limit == 16
