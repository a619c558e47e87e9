"""How much of a prompt is read beside running answers: by the learned times of steps, never nothing, never too much."""

import random

import pytest

from headway.scheduler.clock import NS_PER_MS as MS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.pace import FETCH, LEAST, STRETCH, Pace  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PRIOR = (60.0 * MS, 2.0 * MS, 1.0 * MS)  # 60 ms, 2 ms a token, 1 ms a row more


def test_with_no_answer_running_prompts_get_the_whole_budget() -> None:
    assert Pace(PRIOR).room(0, 256) == 256


def test_beside_answers_a_step_takes_the_stretch_of_what_decoding_takes() -> None:
    pace = Pace(PRIOR)
    alone = pace.decode_ns(10)
    assert alone == 90 * MS
    tokens = pace.room(10, 256)
    assert tokens == 64  # 135 ms at 2 ms a token, in multiples of LEAST
    assert alone + tokens * 2 * MS <= STRETCH * alone


def test_when_more_read_than_answer_reading_weighs_more() -> None:
    pace = Pace(PRIOR)
    few, even, many, crowd = (pace.room(2, 4096, reading) for reading in (1, 2, 6, 1000))
    assert few == even == 48  # 99 ms at 2 ms a token
    assert many == 208  # three times the stretch: 429 ms
    assert crowd == 624  # eight times at most: 1254 ms


def test_a_fast_device_is_bound_by_the_budget_alone() -> None:
    assert Pace((20.0 * MS, 0.01 * MS, 0.0)).room(32, 256) == 224
    assert Pace(PRIOR).room(40, 20) == 1  # a prompt goes on even where decode rows fill the budget


def test_reading_that_is_dearer_than_the_bound_goes_on_all_the_same() -> None:
    assert Pace((10.0 * MS, 50.0 * MS, 0.0)).room(1, 256) == LEAST


def test_it_learns_what_tokens_and_looking_back_cost_and_keeps_the_bound_as_a_prompt_gets_dearer() -> None:
    """The true costs differ from the guess, and steps are noisy."""
    rng = random.Random(5)
    pace, read, worst, late = Pace(PRIOR), 0, 0.0, []
    decode = 80.0 * MS
    for _ in range(40):
        pace.observe(8, 0, round(decode * rng.uniform(0.95, 1.05)))
    assert pace.decode_ns(8) == pytest.approx(decode, rel=0.05)
    for step in range(400):
        tokens = pace.room(8, 256, 1, read)
        looked_back = (tokens + FETCH) * read + tokens * (tokens - 1) // 2
        spent = (decode + tokens * 2.5 * MS + looked_back / 1024 * 0.7 * MS) * rng.uniform(0.95, 1.05)
        pace.observe(8, tokens, round(spent), looked_back)
        if step >= 5 and read < 4000:
            worst = max(worst, spent / decode)
            late.append(spent / decode)
        read = (read + tokens) % 6000
    assert worst < 3.0
    assert sum(late) / len(late) == pytest.approx(STRETCH, rel=0.15)  # and what may be used is used
    assert pace.room(8, 256, 1, 4000) < pace.room(8, 256, 1, 0)


def test_a_far_look_that_takes_all_there_is_still_leaves_the_least() -> None:
    pace = Pace(PRIOR)
    for _ in range(50):
        looked_back = (LEAST + FETCH) * 30_000
        pace.observe(4, LEAST, round(pace.decode_ns(4) + LEAST * 2 * MS + looked_back / 1024 * MS), looked_back)
    assert pace.room(4, 256, 1, 30_000) == LEAST
    assert pace.room(4, 256, 1, 0) > LEAST


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = Pace(PRIOR)
    before = pace.room(8, 256)
    pace.observe(8, before, 60_000 * MS)
    assert pace.room(8, 256) >= before // 2
    pace.observe(8, 0, 60_000 * MS)
    assert pace.decode_ns(8) <= 1.5 * Pace(PRIOR).decode_ns(8)


def test_the_engine_reads_a_prompt_in_the_room_it_is_given_and_answers_the_same() -> None:
    class Tight(Pace):
        def __init__(self) -> None:
            super().__init__((1.0, 1.0, 0.0))
            self.seen: list[tuple[int, int]] = []

        def room(self, rows: int, budget: int, reading: int = 1, read: int = 0) -> int:  # noqa: ARG002
            return 3 if rows else budget

        def observe(self, rows: int, tokens: int, spent_ns: int, looked_back: int = 0) -> None:  # noqa: ARG002
            assert spent_ns > 0
            self.seen.append((rows, tokens))

    pace = Tight()
    subject = tiny.engine(pace=pace)
    wanted = [([5, 6, 7], Params(max_new_tokens=20)), (list(range(1, 46)), Params(max_new_tokens=3))]
    answers = tiny.drive(subject, wanted)
    tiny.expect_solo(answers, wanted)
    assert pace.seen[0] == (0, 40)  # nobody decodes yet: the budget
    assert (1, 3) in pace.seen
    assert max(tokens for rows, tokens in pace.seen if rows) <= 3
    assert len(answers.tokens[0]) == 20
