"""How much of a prompt is read beside running answers: by the learned times of steps, never nothing, never too much."""

import random

import pytest

from headway.scheduler.clock import NS_PER_MS as MS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.pace import LEAST, STRETCH, Pace  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

PRIOR = (60.0 * MS, 2.0 * MS, 1.0 * MS)  # 60 ms, 2 ms a token, 1 ms a row more


def test_with_no_answer_running_prompts_get_the_whole_budget() -> None:
    assert Pace(PRIOR).room(0, 256) == 256


def test_beside_answers_a_step_takes_the_stretch_of_what_decoding_takes() -> None:
    pace = Pace(PRIOR)
    alone = pace.decode_ns(10)
    assert alone == 90 * MS
    tokens = pace.room(10, 256)
    assert tokens == 40  # 90 ms at 2 ms a token, in multiples of LEAST
    assert alone + tokens * 2 * MS <= STRETCH * alone


def test_when_more_read_than_answer_reading_weighs_more() -> None:
    pace = Pace(PRIOR)
    few, even, many, crowd = (pace.room(2, 4096, reading) for reading in (1, 2, 6, 1000))
    assert few == even == 32  # 66 ms at 2 ms a token
    assert many == 160  # three times the stretch: 330 ms
    assert crowd == 488  # eight times at most: 990 ms


def test_a_fast_device_is_bound_by_the_budget_alone() -> None:
    assert Pace((20.0 * MS, 0.01 * MS, 0.0)).room(32, 256) == 224
    assert Pace(PRIOR).room(40, 20) == 1  # a prompt goes on even where decode rows fill the budget


def test_reading_that_is_dearer_than_the_bound_goes_on_all_the_same() -> None:
    assert Pace((10.0 * MS, 50.0 * MS, 0.0)).room(1, 256) == LEAST


def test_it_learns_both_times_and_keeps_the_bound_as_a_prompt_gets_dearer() -> None:
    """The true cost differs from the guess, grows with what was read before, and is noisy."""
    rng = random.Random(5)
    pace, read, worst = Pace(PRIOR), 0, 0.0
    decode = 40.0 * MS
    for _ in range(40):
        pace.observe(8, 0, round(decode * rng.uniform(0.95, 1.05)))
    assert pace.decode_ns(8) == pytest.approx(decode, rel=0.05)
    for step in range(200):
        tokens = pace.room(8, 256)
        spent = (decode + read * 0.004 * MS + tokens * 3.0 * MS) * rng.uniform(0.95, 1.05)
        pace.observe(8, tokens, round(spent))
        read += tokens
        if step >= 5 and read < 8000:
            worst = max(worst, spent / decode)
    assert worst < 3.0
    assert LEAST <= pace.room(8, 256) < Pace(PRIOR).room(8, 256)


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

        def room(self, rows: int, budget: int, reading: int = 1) -> int:  # noqa: ARG002
            return 3 if rows else budget

        def observe(self, rows: int, tokens: int, spent_ns: int) -> None:
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
