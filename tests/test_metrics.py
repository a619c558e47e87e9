"""`headway metrics`: a real server, a real scrape, and every number of status under a name that stays."""

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headway.cli import metrics as command
from headway.cli.app import app
from headway.scheduler import metrics, wire
from tests.live import Live, echo, live

DOCUMENT = (Path(__file__).parent.parent / "docs" / "operating.md").read_text()
NOBODY = ["--connect", "tcp://127.0.0.1:9", "--timeout-ms", "50"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(echo("a"), echo("b", mode="iteration")) as running:
        client = running.client()
        client.wait_ready(2)
        for number in range(3):
            client.ask(type="call", id=str(number), payload=number, model="a", tenant="gold")
        client.ask(type="call", id="x", payload=1, model="nobody's")
        yield running


def page(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample with these labels."""
    [sample] = [one for one in found[name].samples if labels.items() <= one.labels.items()]
    return sample.value


def test_a_scrape_of_a_real_server(server: Live) -> None:
    """The command as it is started, asked over HTTP twice, and ended."""
    line = [
        sys.executable,
        "-m",
        "headway",
        "metrics",
        "--timeout-ms",
        "20000",
        "--connect",
        server.address,
        "--bind",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", process.stderr.readline())
        assert address
        with urllib.request.urlopen(address.group(), timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            found = page(answer.read().decode())
        with urllib.request.urlopen(address.group(), timeout=60) as answer:
            later = page(answer.read().decode())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert value(found, "headway_up") == 1
    assert value(found, "headway_state", state="serving") == 1
    assert value(found, "headway_requests_ended", code="ok") == 3
    assert value(found, "headway_requests_refused", code="unknown_model") == 1
    assert value(found, "headway_lane_waiting", model="a", lane="short") == 0
    assert value(found, "headway_worker_running", model="b") == 0
    assert found["headway_requests_ended"].type == found["headway_worker_progress"].type == "counter"
    assert found["headway_lane_waiting"].type == "gauge"
    assert value(later, "headway_uptime_seconds") > value(found, "headway_uptime_seconds")
    assert all(family.documentation for family in found.values())


def test_every_number_of_status_is_there_and_explained(server: Live) -> None:
    status = server.clients[0].status()
    reply = wire.StatusReply(**{key: status[key] for key in status if key != "type"})
    found = {family.name: family for family in metrics.families(reply)}
    for key, count in status["counters"].items():
        what, _, which = key.partition(".")
        if which:
            name, label, _ = metrics.PARTED[what]
            assert value(found, f"headway_{name}", **{label: which}) == count
        else:
            assert key in metrics.COUNTERS
    for prefix, rows, words in (
        ("lane", status["lanes"], metrics.LANES),
        ("worker", status["workers"], metrics.WORKERS),
    ):
        labels = ("model", "kind", "lane") if prefix == "lane" else ("worker", "model", "kind")
        for row in rows:
            for key, number in row.items():
                if isinstance(number, (int, float)) and key != "progress":
                    assert key in words
                    name, scale = metrics._named(key)
                    where = {label: row[label] for label in labels}
                    assert value(found, f"headway_{prefix}_{name}", **where) == pytest.approx(number * scale)


def experts() -> dict[str, Any]:
    """The section of a real policy and a real predictor, which have seen a little."""
    pytest.importorskip("numpy")
    import numpy as np

    from headway.policies.experts.policy import ExpertAware
    from headway.scheduler import link
    from headway.scheduler.experts import Desk
    from headway.scheduler.spec import PolicySpec

    policy = ExpertAware(2, 4, 4)
    policy.worth.observe(1.12, composed=True)
    policy.worth.observe(1.4, composed=False)
    policy.worth.observe(9.0, composed=False)
    policy.counters.update({"batches.composed": 5, "batches.explored": 1, "door.cold": 2, "forced": 3, "reports": 4})
    policy.passes.update({0: 7, 2: 1})
    policy.shed["gold", "saturated"] = 6
    policy.usage.add("gold", np.ones((2, 4), np.float32))
    card = link.Card(
        name="m", kind="generate", mode="oneshot", max_batch=4, max_num_seqs=4, max_input_tokens=9,
        experts=link.Experts(layers=2, sampled=[0, 1], experts=8, top_k=2, groups=4, devices=4),
    )  # fmt: skip
    desk = Desk(PolicySpec(), lambda _event: None)
    desk.join(card)
    desk.close()
    return policy.report() | desk.report(("m", "generate"))


def test_what_is_known_of_experts() -> None:
    row = experts()
    lane = {"model": "m", "kind": "generate", "lane": "short", "window": "greedy", "held": "kv_full", "experts": row}
    reply = wire.StatusReply(
        id=None, state="odd", uptime_s=1.0, counters={"new.thing": 2}, lanes=[lane], workers=[], batches=[]
    )
    registry = CollectorRegistry()
    registry.register(type("Told", (), {"collect": lambda _self: metrics.families(reply)})())
    found = page(generate_latest(registry).decode())
    for key, number in row.items():
        if isinstance(number, (bool, int, float)) and key not in metrics.EXPERT_COUNTERS:
            assert key in metrics.EXPERTS
            name, scale = metrics._named(key)
            assert value(found, f"headway_moe_{name}", model="m") == pytest.approx(number * scale)
    assert value(found, "headway_moe_batches", reason="composed", kind="generate") == 5
    assert value(found, "headway_moe_door", reason="cold") == 2
    assert value(found, "headway_moe_forced") == 3
    assert value(found, "headway_moe_predictor_changes") == value(found, "headway_moe_reports_dropped") == 0
    assert value(found, "headway_moe_shed", tenant="gold", reason="saturated") == 6
    assert value(found, "headway_moe_tenant_dominant_share", tenant="gold") == 1.0
    assert value(found, "headway_moe_device_backlog_seconds", device="3") == 0
    spread = {
        (one.labels["policy"], one.labels.get("le", one.name)): one.value
        for one in found["headway_moe_imbalance"].samples
    }
    assert (spread["composed", "1.1"], spread["composed", "1.15"], spread["composed", "+Inf"]) == (0, 1, 1)
    assert (spread["fifo", "1.3"], spread["fifo", "1.5"], spread["fifo", "3.0"], spread["fifo", "+Inf"]) == (0, 1, 1, 2)
    assert spread["fifo", "headway_moe_imbalance_sum"] == pytest.approx(10.4)
    passes = {one.labels.get("le", one.name): one.value for one in found["headway_moe_pass_overs"].samples}
    assert (passes["0.0"], passes["1.0"], passes["2.0"], passes["+Inf"]) == (7, 7, 8, 8)
    assert passes["headway_moe_pass_overs_sum"] == 2
    assert value(found, "headway_lane_held", reason="kv_full") == value(found, "headway_state", state="odd") == 1
    assert value(found, "headway_new", reason="thing") == 2  # a newer server's


def test_no_server_is_a_number_and_no_error() -> None:
    shown = CliRunner().invoke(app, ["metrics", "--once", *NOBODY])
    assert shown.exit_code == 0
    assert {name: family.samples[0].value for name, family in page(shown.output).items()} == {"headway_up": 0}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bind", "9464"], "must be host:port"),
        (["--bind", "127.0.0.1:70000"], "a port up to 65535"),
        (["--bind", "203.0.113.7:9464"], "cannot listen there"),
        (["--connect", "http://127.0.0.1"], "must be tcp://host:port"),
    ],
)
def test_what_cannot_be_is_said(flags: list[str], words: str) -> None:
    shown = CliRunner().invoke(app, ["metrics", *NOBODY, *flags])
    assert shown.exit_code == 2
    assert words in re.sub(r"\s+", " ", shown.output)


def test_it_listens_on_this_machine_only_unless_told() -> None:
    assert command.BIND.startswith("127.0.0.1:")
    assert command._listen_at("[::1]:0") == ("::1", 0)


def test_the_document_names_each_metric() -> None:
    """Those of experts are in the document about them."""
    text = DOCUMENT + (Path(__file__).parent.parent / "docs" / "experts.md").read_text()
    names = [name for name, _, _ in metrics.PARTED.values()]
    names += [metrics._named(key)[0] for key in (*metrics.LANES, *metrics.WORKERS, *metrics.EXPERTS)]
    names += [name for name, _ in (*metrics.EXPERT_COUNTERS.values(), *metrics.EXPERT_PARTS.values())]
    assert [
        name for name in names if not re.search(rf"`(headway_|headway_lane_|headway_worker_|_)?{name}`", text)
    ] == []
