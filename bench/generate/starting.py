"""Starting the ways of generating that are compared: what each needs, and where others are looked for."""

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import typer
from rich.progress import Progress

from headway.bench.generate import steps, ways
from headway.bench.generate.report import CONTINUOUS, OURS, SOLO, STATIC, VLLM, Found
from headway.bench.generate.work import Work, make

HFSERVE = "transformers serve"
PEERS = Path.home() / ".cache" / "headway-peers" / "venvs"  # where other servers are looked for
LONG_PROMPT = 4000


class Bench:
    """How to start each way for this work. `most`: requests that run at once; what is started ends with `stack`."""

    def __init__(
        self, folder: Path, work: Sequence[Work], most: int, threads: int, workers: int, stack: ExitStack
    ) -> None:
        self._folder, self._work, self._most = folder, work, most
        self._threads, self._workers, self._stack = threads, workers, stack
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        self._context = int(config.get("max_position_embeddings") or LONG_PROMPT)
        self._plain: subprocess.Popen[bytes] | None = None

    def makers(self, vllm: Path, hfserve: Path, only: str) -> dict[str, Callable[[], ways.Way]]:
        """Those named in `only`, with commas; empty: all."""
        wanted = {name.strip() for name in only.split(",") if name.strip()}
        longest = max(len(one.ids) + one.new for one in self._work)
        all_ways: dict[str, Callable[[], ways.Way]] = {
            OURS: lambda: self._headway(self._most, longest),
            SOLO: lambda: ways.Plain(SOLO, "solo", self._shared()),
            STATIC: lambda: ways.Plain(STATIC, "static", self._shared()),
            CONTINUOUS: lambda: ways.Plain(CONTINUOUS, "continuous", self._shared()),
            HFSERVE: lambda: ways.transformers_serve(hfserve, self._endless(), self._threads),
            VLLM: lambda: ways.vllm(vllm, self._folder, self._threads, self._most, max(1024, longest)),
        }
        if unknown := wanted - set(all_ways):
            raise typer.BadParameter(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(all_ways)}")
        return {name: maker for name, maker in all_ways.items() if not wanted or name in wanted}

    def _headway(self, concurrency: int, longest: int) -> ways.Headway:
        text = msgspec.json.decode((self._folder / "config.json").read_bytes())
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        token_bytes = 2 * 4 * text["num_hidden_layers"] * heads * width
        kv_mib = int(ways.KV_BYTES_SPARE * token_bytes * longest * concurrency) // (1 << 20) + 16
        return ways.Headway(self._folder, self._workers, self._threads // self._workers, concurrency, kv_mib)

    def _shared(self) -> "subprocess.Popen[bytes]":
        if self._plain is None:
            self._plain = ways.start_plain(self._folder, self._threads)
            self._stack.callback(ways.stop, self._plain)
        return self._plain

    def _endless(self) -> Path:
        return ways.endless(self._folder, Path(self._stack.enter_context(tempfile.TemporaryDirectory())))

    def long_prompt(self) -> steps.LongPrompt:
        """A server of its own, of one worker, so that all streams and the prompt meet in one engine."""
        self._workers, before = 1, self._workers
        room = self._context - 8
        prompt = make(self._folder, 1, (min(LONG_PROMPT, room),) * 2, (4, 4), 7)[0]
        tokens = min(steps.STREAM_TOKENS, room - steps.STREAM_PROMPT)
        streams = make(self._folder, steps.STREAMS, (steps.STREAM_PROMPT,) * 2, (tokens, tokens), 8)
        way = self._headway(steps.STREAMS + 1, len(prompt.ids) // 4 + tokens + steps.STREAM_PROMPT)
        try:
            return steps.long_prompt(way, streams, prompt)
        finally:
            self._workers = before
            ways.stop(way.process)


def started(
    makers: dict[str, Callable[[], ways.Way]], found: Found, progress: Progress, stack: ExitStack
) -> Iterator[ways.Way]:
    """Each way as it is up; why one is not goes into `found`."""
    task = progress.add_task("starting", total=len(makers))
    for name, maker in makers.items():
        progress.update(task, description=f"starting {name}")
        try:
            way = maker()
        except ways.CannotStartError as error:
            found.skipped[name] = str(error)
        else:
            stack.callback(ways.stop, way.process)
            yield way
        progress.advance(task)
