"""Which batches are measured, in what order, and when it is enough.

Batch sizes double at each length until more requests at once bring little more (the knee), until memory runs out, or
until time is up. Sizes go round by length, so that a run that is cut short has seen all lengths; what time is left is
spent on seeing them again, backwards, so that a neighbour's burst does not fall on one size alone. What fails is
written down and not tried again, nor anything that takes more memory. The engine is a `Prober`: in a process of its
own, which may die and is then started again.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec

from headway.bench.tune.probe import About, Found, Job
from headway.scheduler import clock
from headway.scheduler.config import ConfigError
from headway.scheduler.spec import ModelSpec

GROWTH_MIN = 1.1  # twice the requests bring less than this, twice in a row: past the knee
REPEATS = 3  # of a one-shot batch; a generating engine repeats itself by its steps
STEPS = 8  # of a generating engine, with all requests running
ROOM_TOKENS = 32  # of each request beside its input: what it generates meanwhile, and half-empty pages
PASSES = 3  # of every size that went well, as far as there is time
DEATHS_MAX = 3  # of the process, before the rest is given up
STOP_S = 10.0


class Tried(msgspec.Struct, frozen=True):
    """One batch size at one length, as it is written down. `took_ms`: the median of a batch, or of a step that only
    generates; `rate`: requests (or generated tokens) a second; `read_ms`: all prompts, of a generating engine.
    `wall_s`: of one pass; `passes_ms`: `took_ms` of each pass by itself.
    `ended`: ok | out_of_memory | died | no_room | no_time | error."""

    requests: int
    tokens: int
    ended: str
    took_ms: float = 0.0
    rate: float = 0.0
    read_ms: float = 0.0
    wall_s: float = 0.0
    passes_ms: list[float] = []
    message: str = ""
    found: Found = Found()


class Prober(Protocol):
    """Runs jobs, one after the other."""

    about: About

    def run(self, job: Job) -> Found: ...

    def restart(self) -> None: ...


class Probe:
    """The process. Raises ConfigError if its engine cannot be made."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid if self._process else 0

    def restart(self) -> None:
        """A new process, with the model loaded anew."""
        self.close()
        command = [sys.executable, "-m", "headway.bench.tune.probe", self._spec.model_dump_json(exclude_unset=True)]
        # in a session of its own: Ctrl-C is for whoever measures, who then ends it
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        line = self._line()
        if not line:
            raise ConfigError(f"the engine of {self._spec.name} did not start; what it said is above")
        self.about = msgspec.json.decode(line, type=About)

    def run(self, job: Job) -> Found:
        """What it found; code `died` if the process did not survive it."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = b""
        if line:
            return msgspec.json.decode(line, type=Found)
        return Found(code="died", message=f"the process ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Walk:
    """The walk over sizes and lengths. `wrote` is told of each that was tried."""

    def __init__(
        self, prober: Prober, *, budget_s: float, batch_max: int, seed: int, wrote: Callable[[Tried], None]
    ) -> None:
        self._prober = prober
        self._budget_ns = int(budget_s * clock.NS_PER_S)
        self._batch_max = batch_max
        self._seed = seed
        self._wrote = wrote
        self._deaths = self._until_ns = 0
        self.tried: list[Tried] = []
        self.ended_by = "all sizes were measured"

    def run(self, lengths: Sequence[int]) -> list[Tried]:
        """Everything that was tried, in order."""
        self._until_ns = clock.now_ns() + self._budget_ns
        self._prober.run(self._job(1, min(lengths), 99))  # caches and kernels, not looked at
        open_, requests = sorted(lengths), 1
        while open_ and requests <= self._batch_max:
            for tokens in list(open_):
                if not self._goes_on(requests, tokens):
                    open_.remove(tokens)
                if self._deaths >= DEATHS_MAX:
                    self.ended_by = f"the engine's process died {self._deaths} times"
                    return self.tried
            requests *= 2
        for _ in range(PASSES - 1):
            self._again()
        return self.tried

    def _again(self) -> None:
        """Every size that went well, once more."""
        for at, one in reversed(list(enumerate(self.tried))):
            if one.ended != "ok" or clock.now_ns() + int(one.wall_s * clock.NS_PER_S) > self._until_ns:
                continue
            more = self._try(one.requests, one.tokens)
            self._wrote(more)
            if more.ended != "ok":
                self._prober.restart()
                return
            self.tried[at] = _merged(one, more)

    def _goes_on(self, requests: int, tokens: int) -> bool:
        """Try this size; False: no larger one of this length."""
        if any(
            one.ended in ("out_of_memory", "died") and one.requests * one.tokens <= requests * tokens
            for one in self.tried
        ):
            return False
        if not self._has_room(requests, tokens):
            self._note(Tried(requests, tokens, "no_room", message="more tokens than the KV cache holds"))
            return False
        if clock.now_ns() + self._expected_ns(tokens) > self._until_ns:
            self.ended_by = "time was up"
            self._note(Tried(requests, tokens, "no_time", message="it would take longer than is left"))
            return False
        one = self._try(requests, tokens)
        self._note(one)
        if one.ended == "out_of_memory" and requests > 2:  # between the last that went and this
            self._note(self._try(requests * 3 // 4, tokens))
        if one.ended == "died":
            self._deaths += 1
            if self._deaths < DEATHS_MAX:
                self._prober.restart()
        return one.ended == "ok" and not self._past_knee(tokens)

    def _has_room(self, requests: int, tokens: int) -> bool:
        about = self._prober.about
        return not about.kv_tokens or requests * (tokens + ROOM_TOKENS) <= about.kv_tokens

    def _expected_ns(self, tokens: int) -> int:
        """The next size of this length takes about twice the last, or what a shorter one does for its tokens."""
        same = [one.wall_s * 2 for one in self.tried if one.tokens == tokens]
        shorter = [one.wall_s * tokens / one.tokens for one in self.tried if one.requests == 1]
        return int((same or shorter or [0.0])[-1] * clock.NS_PER_S)

    def _job(self, requests: int, tokens: int, repeat: int) -> Job:
        return Job(requests, tokens, STEPS, self._seed + repeat)

    def _try(self, requests: int, tokens: int) -> Tried:
        founds, began_ns = [], clock.now_ns()
        for repeat in range(1 if self._prober.about.mode == "iteration" else REPEATS):
            found = self._prober.run(self._job(requests, tokens, repeat))
            if found.code:
                ended = found.code if found.code in ("out_of_memory", "died") else "error"
                return Tried(requests, tokens, ended, message=found.message, found=found)
            founds.append(found)
        return _tried(requests, tokens, founds, (clock.now_ns() - began_ns) / clock.NS_PER_S)

    def _note(self, one: Tried) -> None:
        self.tried.append(one)
        self._wrote(one)

    def _past_knee(self, tokens: int) -> bool:
        rates = [one.rate for one in self.tried if one.tokens == tokens and one.ended == "ok"]
        return len(rates) >= 3 and max(rates[-2:]) < GROWTH_MIN * max(rates[:-2])


def _tried(requests: int, tokens: int, founds: Sequence[Found], wall_s: float) -> Tried:
    whole = Found(
        [batch for found in founds for batch in found.batches],
        [step for found in founds for step in found.steps],
        peak_bytes=max(found.peak_bytes for found in founds),
    )
    full = [took for rows, _, took in whole.steps if rows == requests]
    took_ns = median(full or [took for _, _, took in whole.steps] or [took for _, _, took in whole.batches])
    read_ns = sum(took for _, _, took in whole.batches) if whole.steps else 0
    rate = requests * clock.NS_PER_S / took_ns
    took_ms = took_ns / clock.NS_PER_MS
    return Tried(requests, tokens, "ok", took_ms, rate, read_ns / clock.NS_PER_MS, wall_s, [took_ms], found=whole)


def _merged(one: Tried, more: Tried) -> Tried:
    """Two passes of a size as one: medians over all batches and steps of both."""
    both = _tried(one.requests, one.tokens, [one.found, more.found], more.wall_s)
    passes = [*one.passes_ms, *more.passes_ms]
    return msgspec.structs.replace(both, read_ms=min(one.read_ms, more.read_ms), passes_ms=passes)


def lengths_for(about: About, asked: Sequence[int]) -> list[int]:
    """The lengths that the model takes, of those asked for."""
    most = about.max_input_tokens or max(asked)
    if about.context_tokens:
        most = min(most, about.context_tokens - ROOM_TOKENS)
    fits = sorted({tokens for tokens in asked if tokens <= most})
    return fits or [max(1, most)]


def recorder(path: Path, about: About, spec: ModelSpec) -> Callable[[Tried], None]:
    """Writes what was tried to a file, a JSON object a line; the first says what is measured."""
    head = {"spec": spec.model_dump(exclude_unset=True), "about": msgspec.to_builtins(about), "at_s": clock.wall_s()}
    path.write_bytes(msgspec.json.encode(head) + b"\n")

    def wrote(one: Tried) -> None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(one) + b"\n")

    return wrote
