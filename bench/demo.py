"""The main job, shown: a real server, a burst of mixed real prompts over the real wire, streamed answers, and why.

    headway demo

Starts `headway serve` with the default model as its own process, sends chats in three pulses and one long prompt,
shows the answers as they stream in, and then what the scheduler did: each batch with its size, the reason it was
launched, how long it waited, its time to first token and its tokens per second. Progress goes to stderr.
"""

import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.bench.overhead import free_address
from headway.scheduler import clock, wire
from headway.scheduler.client import Client
from headway.scheduler.errors import HeadwayError

LOAD_MS = 600_000  # a first start converts the model; later ones take seconds
PULSE_MS = 700
ANSWER_CHARS = 64

CONFIG = """
bind: {address}
log_level: info
policy: {{bypass_tokens: {bypass}}}
models:
  - {{name: smollm2, engine: generate, model: {model}}}
"""

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into French.",
    "What does a baker make?",
    "Give me a synonym for 'quick'.",
    "Why is the sky blue? Answer in one sentence.",
    "What is 7 times 8?",
    "Who wrote Romeo and Juliet?",
    "List two animals that can fly.",
    "What is the opposite of 'cold'?",
    "Explain photosynthesis in one sentence.",
    "What do bees make?",
    "Tell me a very short story about a lighthouse.",
    "What is the largest planet?",
)
PASSAGE = (
    "The lighthouse keeper climbed the stairs each evening, wound the clockwork that turned the lamp, wrote down the "
    "wind and the state of the sea, and watched the ships go by on their way to harbours that he would never visit. "
)


@dataclass
class Line:
    """One request on the screen."""

    question: str
    max_new_tokens: int
    answer: str = ""
    state: str = "waiting"
    timing: wire.Timing | None = None
    tokens: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)


def prompts(count: int, seed: int) -> list[Line]:
    """Mixed chats: short questions with different answer lengths, and one prompt that is long enough for its lane."""
    rng = random.Random(seed)
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(count - 1)]
    rng.shuffle(questions)
    lines = [Line(text, rng.randrange(12, 48), messages=[{"role": "user", "content": text}]) for text in questions]
    long = PASSAGE * 26 + "\n\nWho is this text about?"
    shown = f"(a prompt of {len(long.split())} words) Who is this text about?"
    lines.insert(len(lines) // 2, Line(shown, 12, messages=[{"role": "user", "content": long}]))
    return lines


def _screen(lines: list[Line]) -> Group:
    table = Table(title="answers, as they stream in", expand=True)
    table.add_column("question", ratio=4, no_wrap=True, overflow="ellipsis")
    table.add_column("answer", ratio=5, no_wrap=True, overflow="ellipsis")
    table.add_column("TTFT ms", justify="right")
    table.add_column("state")
    for line in lines:
        shown = " ".join(line.answer.split())[:ANSWER_CHARS]
        ttft = f"{line.timing.ttft_ms:.0f}" if line.timing and line.timing.ttft_ms else ""
        table.add_row(Text(line.question), Text(shown), ttft, line.state)
    return Group(table)


async def _ask(client: Client, line: Line) -> None:
    line.state = "sent"
    try:
        stream = client.stream(messages=line.messages, max_new_tokens=line.max_new_tokens)
        async for delta in stream:
            line.answer += delta.text
            line.state = "streaming"
        line.timing, line.tokens = stream.result.timing, len(stream.result.token_ids)
        line.state = stream.result.finish_reason
    except HeadwayError as error:
        line.state = error.code


async def _burst(client: Client, lines: list[Line], console: Console) -> float:
    """Send everything in three pulses; seconds until the last answer."""
    begin = clock.now_ns()
    with Live(_screen(lines), console=console, refresh_per_second=8, transient=False) as live:

        async def redraw() -> None:
            while True:
                live.update(_screen(lines))
                await anyio.sleep(0.12)

        async with anyio.create_task_group() as drawing:
            drawing.start_soon(redraw)
            third = -(-len(lines) // 3)
            async with anyio.create_task_group() as asking:
                for start in range(0, len(lines), third):
                    for line in lines[start : start + third]:
                        asking.start_soon(_ask, client, line)
                    await anyio.sleep(PULSE_MS / 1000)
            drawing.cancel_scope.cancel()
        live.update(_screen(lines))
    return (clock.now_ns() - begin) / clock.NS_PER_S


async def _wait_for_model(client: Client, server: "subprocess.Popen[bytes]", console: Console) -> None:
    limit_ns = clock.now_ns() + LOAD_MS * clock.NS_PER_MS
    with console.status("the worker loads its model (the first time it is converted and cached: about a minute)"):
        while clock.now_ns() < limit_ns:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {server.returncode}; its log is above")
            try:
                if any(model.workers for model in (await client.info()).models):
                    return
            except HeadwayError as error:
                if error.code != "unreachable":
                    raise
            await anyio.sleep(0.2)
    raise RuntimeError(f"no model was ready within {LOAD_MS // 1000} s")


def batch_table(batches: list[dict[str, Any]]) -> Table:
    """What the scheduler did, a batch a row."""
    table = Table(title="batches: what ran together, and why then", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("#", "lane", "size", "running", "why launched", "wait ms", "TTFT ms", "tokens", "tok/s"):
        text = name in ("lane", "why launched")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in batches:
        table.add_row(
            str(row["batch"]),
            row["lane"],
            str(row["size"]),
            str(row["running"]),
            row["reason"],
            f"{row['waited_ms']:.1f}",
            f"{row['ttft_ms']:.0f}" if "ttft_ms" in row else "-",
            str(row["output_tokens"]),
            f"{row['tokens_per_s']:.1f}" if "tokens_per_s" in row else "-",
        )
    return table


async def _show(address: str, server: "subprocess.Popen[bytes]", lines: list[Line], console: Console) -> int:
    async with Client(address) as client:
        await _wait_for_model(client, server, console)
        took_s = await _burst(client, lines, console)
        status = await client.status(batches=64)
    console.print()
    console.print(batch_table(status.batches))
    tokens = sum(line.tokens for line in lines)
    console.print(
        f"{len(lines)} requests, {tokens} tokens in {took_s:.1f} s: {tokens / took_s:.1f} tokens/s. "
        "A batch's requests join those that run already at the next step; `running` counts both."
    )
    bad = [line for line in lines if line.state not in ("stop", "length")]
    return 4 if bad else 0


def run(requests: int = 16, model: str = "smollm2", seed: int = 0) -> int:
    """Run the demonstration; the exit code."""
    console = Console()
    lines = prompts(max(2, requests), seed)
    address = free_address()
    with tempfile.TemporaryDirectory(prefix="headway-demo-") as folder:
        config = Path(folder) / "demo.yaml"
        config.write_text(CONFIG.format(address=address, model=model, bypass=1024))
        console.print(f"starting `headway serve` on {address}")
        server = subprocess.Popen([sys.executable, "-m", "headway", "serve", "--config", str(config)])
        try:
            return anyio.run(_show, address, server, lines, console)
        except RuntimeError as error:
            console.print(f"[red]{error}[/red]")
            return 5
        finally:
            server.terminate()
            server.wait(30)
