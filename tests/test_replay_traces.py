"""Public traces, slowed and shortened, on a generating model that is real but tiny: each request has its answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from headway.bench.simulated_live import live
from headway.cli.app import app
from tests import torch_models as tiny

TRACES = next((p / "shared/traces" for p in Path(__file__).parents if (p / "shared/traces").is_dir()), None)
ONES = {"AzureLLMInferenceTrace_conv.csv": ("0.1", "0.1"), "mooncake_conversation_first.jsonl": ("0.01", "0.02")}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("traces")
    tiny.model("llama").save_pretrained(folder / "model")
    with live.started(folder, str(folder / "model"), 1, 1) as server:
        yield server.address


@pytest.mark.skipif(TRACES is None, reason="shared/traces is not there")
@pytest.mark.parametrize("name", ONES)
def test_a_slice_of_a_public_trace_is_answered_whole(address: str, name: str, tmp_path: Path) -> None:
    assert TRACES is not None
    report, (inputs, outputs) = tmp_path / "r.json", ONES[name]
    options = ["--limit", "24", "--rate", "40", "--input-scale", inputs, "--output-scale", outputs]
    options += ["--clip-input", "96", "--clip-output", "12", "--connect", address, "--timeout-ms", "60000"]
    result = CliRunner(env={"COLUMNS": "140"}).invoke(
        app, ["replay", str(TRACES / name), *options, "--json", str(report)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert found["completed"] == found["num_prompts"] == found["first_tokens"] == 24
    assert found["total_output_tokens"] == sum(found["requests"]["output_lens"])
    assert 1 <= min(found["requests"]["output_lens"]) <= max(found["requests"]["output_lens"]) <= 12
    assert found["mean_ttft_ms"] > 0
