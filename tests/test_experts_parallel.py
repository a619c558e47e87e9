"""Real expert parallelism: two ranks of Transformers' own plan over gloo, with a trained model and recorded documents.

What is checked is what the ranks count; what mixing saves is a measurement: python -m headway.bench.experts.parallel.
"""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="loading a model by an expert-parallel plan imports accelerate")

from headway.bench.experts.parallel import measure, pick

SHARED = next((p / "shared" for p in Path(__file__).parents if (p / "shared/models").is_dir()), None)


@pytest.mark.models
@pytest.mark.skipif(SHARED is None, reason="shared/models is not there")
def test_ranks_count_what_one_device_counts() -> None:
    assert SHARED is not None
    recording = SHARED / "traces/moe/dsv3_32.npz"
    _, batches, shares = pick(recording, 8)
    assert shares[0] > 0.6
    assert shares[1] < 0.42
    assert all(0.45 < share < 0.55 for share in shares[2:])
    assert sorted(batches[2] + batches[3]) == sorted(batches[0] + batches[1])
    found = measure(SHARED / "models/tiny-deepseek-v3", recording, texts=8, rounds=1)
    assert found.counted_right
    assert found.shares == shares
    assert all(len(ranks) == 2 and min(ranks) > 0 for ranks in (*found.one_sided, *found.mixed))


@pytest.mark.skipif(SHARED is None, reason="shared/models is not there")
def test_a_rank_that_fails_is_heard(tmp_path: Path) -> None:
    assert SHARED is not None
    with pytest.raises(RuntimeError, match="a rank failed"):
        measure(tmp_path / "nothing", SHARED / "traces/moe/dsv3_32.npz", texts=4, rounds=1)
