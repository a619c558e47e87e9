"""The documents say what the code does: the README's client is run, the diagrams are made from the tables, every reason
and counter that the code knows is explained. `--rewrite` makes the diagrams anew."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.scheduler.lifecycle import MOVES, WORKER_MOVES
from tests.live import echo, live

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPERATING = (ROOT / "docs" / "operating.md").read_text()


def block_after(text: str, marker: str) -> str:
    """The fenced block that follows a comment."""
    found = re.search(rf"<!-- {marker} -->\s*```\w*\n(.*?)```", text, re.S)
    assert found, f"no block after {marker}"
    return found.group(1)


def test_the_ten_line_client_of_the_readme_works() -> None:
    source = block_after(README, "ten lines")
    lines = [line for line in source.splitlines() if line]
    assert len(lines) <= 10
    assert {line.split()[1] for line in lines if line.startswith("import")} == {"msgpack", "zmq"}
    with live(echo("stream", mode="iteration")) as server:
        program = source.replace("tcp://127.0.0.1:5555", server.address)
        shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("The sea is\n")
    assert "'finish_reason': 'stop'" in shown


def test_the_callable_of_the_readme_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = re.search(r"```python\n# shout.py\n(.*?)```", README, re.S)
    assert source
    (tmp_path / "shout.py").write_text(source.group(1))
    monkeypatch.chdir(tmp_path)
    model = echo("shout").model_copy(update={"engine": "shout:predict"})
    with live(model) as server:
        assert server.client().ask(type="call", id="1", payload="hello")["value"] == "HELLO"


def diagram(table: dict[str, dict[str, str]]) -> str:
    """A lifecycle table as a Mermaid state diagram."""
    arrows = [f"    {state} --> {after}: {event}" for state, moves in table.items() for event, after in moves.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))}", *arrows, "```"])


@pytest.mark.parametrize(("name", "table"), [("request", MOVES), ("worker", WORKER_MOVES)])
def test_the_diagrams_are_the_tables(name: str, table: dict[str, dict[str, str]], rewrite: bool) -> None:
    path = ROOT / "docs" / "design.md"
    text = path.read_text()
    if rewrite:
        pattern = rf"(<!-- {name} -->\n)(\n```mermaid.*?```\n)?"
        path.write_text(re.sub(pattern, rf"\1\n{diagram(table)}\n", text, count=1, flags=re.S))
        text = path.read_text()
    assert f"<!-- {name} -->\n\n{diagram(table)}\n" in text


def reasons() -> Iterator[str]:
    """Every reason for a launch that the code can give."""
    for folder in ("policies", "scheduler"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for inside in re.findall(r"Launch\(([^)]*)\)", text):
                yield from re.findall(r'"(\w+)"', inside)
            yield from re.findall(r'(?:Choice\(lane|Wait\(NEVER_NS|Placed\([^"]*), "(\w+)"', text)
            yield from re.findall(r'Refusal\(.*"(\w+)"\)', text)
            yield from re.findall(r'^ +reason = "(\w+)"', text, re.M)


def test_every_reason_and_counter_is_explained() -> None:
    known = set(reasons())
    assert {"full", "greedy", "window_over", "long_alone", "on_trial"} <= known
    missing = {reason for reason in known if f"`{reason}`" not in OPERATING}
    assert not missing
    counters = set()
    for path in (ROOT / "scheduler").glob("*.py"):
        counters |= set(re.findall(r'counters\["(\w+)"\]', path.read_text()))
    assert not {name for name in counters if f"`{name}`" not in OPERATING}
