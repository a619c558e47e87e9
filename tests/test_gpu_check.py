"""The script for a machine with a GPU, on one without: every part of it runs, and what it can know here is right."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.bench import gpu_check


def test_every_part_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert set(found) == {"machine", "took_s", "float32_tokens", "kernels", "served", "transformers"}
    assert (found["float32_tokens"]["same"], found["float32_tokens"]["ok"]) == (8, True)
    assert found["served"]["tokens"] == {"whole": 8, "of": 8, "before_first_difference": 1.0}
    assert found["served"]["facts"]["attention"] in ("packed sdpa", "packed paged")
    assert min(*found["served"]["tokens_per_s"].values(), *found["transformers"]["tokens_per_s"].values()) > 0


def test_a_part_that_fails_says_so_and_what_has_no_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_self: gpu_check.Check) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(gpu_check.Check, "machine", broken)
    assert gpu_check.main(["--device", "cpu", "--seconds", "-1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found.values()) == {"left out: no time"}
    for name in ("exact", "kernels", "served", "transformers"):
        monkeypatch.setattr(gpu_check.Check, name, lambda _self: {"ok": True})
    assert gpu_check.main(["--device", "cpu"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == {"error": "RuntimeError: no kernel image is available"}
    assert found["served"] == {"ok": True}
