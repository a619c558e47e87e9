"""Pages are never lost or held twice, and a plan reads only what its own request has written."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.workers.generate.pages import PagedCache, Pages  # noqa: E402
from headway.workers.generate.plan import Plan, Span  # noqa: E402

PAGE = 4
CPU = "cpu"


def test_pages_go_around() -> None:
    pages = Pages(5)
    first, second = pages.take(2), pages.take(3)
    assert sorted(first + second) == list(range(5))
    assert (pages.free, pages.used, repr(pages)) == (0, 5, "<Pages 5/5 used>")
    pages.give(first)
    assert sorted(pages.take(2)) == sorted(first)


def test_more_than_is_free_cannot_be_taken() -> None:
    pages = Pages(3)
    pages.take(2)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pages.take(2)
    assert pages.free == 1


def test_a_page_is_returned_once() -> None:
    pages = Pages(3)
    held = pages.take(2)
    pages.give(held)
    with pytest.raises(AssertionError, match="returned twice"):
        pages.give(held[:1])


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(7)
    pages, held = Pages(50), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            pages.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(pages.take(rng.randint(0, pages.free)))
        flat = [page for some in held for page in some]
        assert len(set(flat)) == len(flat) == pages.used


def spans(rng: random.Random, count: int, *, decode: bool) -> list[Span]:
    pages = list(range(200))
    rng.shuffle(pages)
    made = []
    for _ in range(count):
        start = rng.randint(0, 30)
        length = 1 if decode else rng.randint(2, 20)
        held = [pages.pop() for _ in range(-(-(start + length) // PAGE))]
        made.append(Span(list(range(length)), start, held, last=rng.random() < 0.7))
    return made


def own_slots(span: Span) -> list[int]:
    return [span.pages[at // PAGE] * PAGE + at % PAGE for at in range(span.end)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_reads_only_its_own_slots(exact: bool) -> None:
    rng = random.Random(3)
    for _ in range(50):
        rows, chunks = spans(rng, rng.randint(0, 5), decode=True), spans(rng, rng.randint(0, 3), decode=False)
        if not rows and not chunks:
            continue
        plan = Plan(rows, chunks, PAGE, CPU, exact=exact)
        write = [slot for span in [*rows, *chunks] for slot in own_slots(span)[span.start :]]
        assert plan.write.tolist() == write
        if plan.read is None:
            assert not rows
            assert all(span.start == 0 for span in chunks)
            continue
        read = []
        for block in plan.rectangles:
            assert block.key_start == len(read) or exact
            for span in rows[block.start : block.end]:
                padding = 0 if exact else block.width - span.end
                read += own_slots(span) + own_slots(span)[:1] * padding
        assert plan.read.tolist() == read + [slot for span in chunks for slot in own_slots(span)]


def test_lengths_for_flash_are_cumulative() -> None:
    plan = Plan(
        [Span([5], 6, [3, 1], True), Span([6], 0, [4], True)],
        [Span([1, 2, 3], 4, [0, 2], False)],
        PAGE,
        CPU,
        exact=True,
    )
    assert plan.queries_at.tolist() == [0, 1, 2, 5]
    assert plan.keys_at.tolist() == [0, 7, 8, 15]
    assert (plan.queries_max, plan.keys_max) == (3, 7)
    assert plan.lasts.tolist() == [0, 1]
    assert plan.positions.tolist() == [[6, 0, 4, 5, 6]]


def test_masks_hide_padding_the_future_and_what_is_outside_the_window() -> None:
    plan = Plan([Span([5], 3, [3], True), Span([6], 1, [4], True)], [Span([1, 2], 2, [0], True)], PAGE, CPU)
    seen = lambda mask: (mask == 0).int().tolist()  # noqa: E731
    assert seen(plan.row_mask(0, 0, torch.float32)[:, 0, 0]) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert seen(plan.row_mask(0, 2, torch.float32)[:, 0, 0]) == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert seen(plan.chunk_mask(0, 0, torch.float32)) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(plan.chunk_mask(0, 2, torch.float32)) == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert plan.row_mask(0, 0, torch.float32) is plan.row_mask(0, 0, torch.float32)  # once for all layers


def widths(lengths: list[int], page: int = PAGE) -> list[tuple[int, int]]:
    """Rows and width of each rectangle that rows of these lengths read."""
    rows = [Span([1], length - 1, list(range(-(-length // page))), last=True) for length in lengths]
    return [(block.end - block.start, block.width) for block in Plan(rows, [], page, CPU).rectangles]


def test_a_long_row_does_not_make_short_ones_read_as_much() -> None:
    assert widths([4000, 120, 110, 100]) == [(1, 4000), (3, 120)]
    assert widths([4000, 3900, 900, 880, 860, 60, 50]) == [(2, 4000), (3, 900), (2, 60)]
    assert widths([200, 190, 180, 20]) == [(4, 200)]  # not worth another call
    assert widths([500]) == [(1, 500)]
    assert widths([100, 4000, 100]) == [(1, 100), (1, 4000), (1, 100)]  # whatever the order, rows stay where they are


def test_rectangles_cover_every_row_once() -> None:
    rng = random.Random(4)
    for _ in range(100):
        lengths = [rng.randint(1, 2000) for _ in range(rng.randint(1, 40))]
        rows = [Span([1], length - 1, list(range(-(-length // PAGE))), last=True) for length in lengths]
        at = key_at = 0
        for block in Plan(rows, [], PAGE, CPU).rectangles:
            assert (block.start, block.key_start) == (at, key_at)
            assert block.width == max(lengths[block.start : block.end])
            at, key_at = block.end, block.key_end
        assert at == len(lengths)


def test_the_cache_returns_what_was_written() -> None:
    torch.manual_seed(0)
    cache = PagedCache(8 * PAGE)
    span = Span([1, 2, 3, 4, 5], 0, [6, 2], True)
    cache.plan = Plan([], [span], PAGE, CPU)
    keys, values = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 4)
    assert cache.update(keys, values, 0)[0] is keys  # a whole prompt: nothing older to read
    cache.plan = Plan([Span([6], 5, [6, 2], True)], [], PAGE, CPU)
    new_key, new_value = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 4)
    read_keys, read_values = cache.update(new_key, new_value, 0)
    assert torch.equal(read_keys, torch.cat([keys, new_key], 2))
    assert torch.equal(read_values, torch.cat([values, new_value], 2))


def test_a_larger_cache_has_the_same_layers() -> None:
    cache = PagedCache(PAGE)
    cache.plan = Plan([], [Span([1, 2], 0, [0], True)], PAGE, CPU)
    for layer in range(3):
        cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 4), layer)
    assert cache.bytes_per_token == 3 * 2 * (8 + 4) * 4
    larger = cache.like(100)
    assert larger.bytes_per_token == cache.bytes_per_token
    assert {store.shape[0] for store in [*larger.keys.values(), *larger.values.values()]} == {100}
