"""What an engine costs, without one: a linear model of its time, with noise, and which of three shapes it has.

    one-shot    a batch takes  a + b x tokens + m x requests      tokens: the sum, or with `padded` n x the longest
    static      the same for the prompts, then a step for each token of the longest answer:  + steps x (step + row x n)
    iteration   a step takes   a + b x tokens + m x rows          prompts in chunks, a token a row: see iteration.py

Presets are those of the window measurements: e1 a small model on a CPU, e2 launch-bound (a GPU), e3 compute-bound,
where batches save nothing; `static` and `gen` one 20 ms generator in its two modes, `fast` a 6 ms one. Never here: what
the core knows. It learns these numbers from reports, as it does live.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.steps import Shape, StepCost
from headway.bench.sim.synthetic import ClosedLoop
from headway.scheduler.config import ConfigError

NS_PER_MS = 1_000_000
STRAGGLER_TIMES = 3.0  # how much longer a straggler takes
RUN = 32  # measured ratios are taken so many in a row: a slow second is more than one slow step


@dataclass(frozen=True)
class Engine:
    """Times in milliseconds. `noise`: sigma of a lognormal factor with mean 1; `stragglers`: share of them. `steps`:
    what a step costs, where it was measured; a, b and m are then a line near it."""

    name: str
    a_ms: float
    b_ms: float
    m_ms: float
    padded: bool = False
    iteration: bool = False
    step_ms: float = 0.0
    row_ms: float = 0.0
    step_tokens: int = 256
    noise: float = 0.0
    stragglers: float = 0.0
    steps: StepCost | None = None

    def computed(self, tokens: Sequence[int]) -> int:
        """Tokens that a batch computes, padding included."""
        return max(tokens) * len(tokens) if self.padded else sum(tokens)

    def batch_ns(self, tokens: Sequence[int], max_new: Sequence[int]) -> int:
        """One one-shot batch."""
        count = len(tokens)
        steps = max(max_new) if self.step_ms else 0
        prompts_ms = self.a_ms + self.b_ms * self.computed(tokens) + self.m_ms * count
        return round((prompts_ms + steps * (self.step_ms + self.row_ms * count)) * NS_PER_MS)

    def step_ns(self, shape: Shape) -> int:
        """One step of an iteration-level engine."""
        if self.steps is not None:
            return round(self.steps.step_ms(shape) * NS_PER_MS)
        rows, tokens = shape.rows + shape.chunks, shape.rows + shape.read
        return round((self.a_ms + self.b_ms * tokens + self.m_ms * rows) * NS_PER_MS)

    def alone_ns(self, tokens: int, max_new: int) -> int:
        """One request with the engine to itself."""
        if not self.iteration:
            return self.batch_ns([tokens], [max_new])
        reads = max(1, math.ceil(tokens / self.step_tokens))
        writes = max(0, max_new - 1)  # the first token comes with the last of the prompt
        took_ms = (reads + writes) * (self.a_ms + self.m_ms) + (tokens + writes) * self.b_ms
        return round(took_ms * NS_PER_MS)


class Noise:
    """What a run makes of the declared time. One for each run, seeded."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._sigma = engine.noise
        self._stragglers = engine.stragglers
        self._rng = random.Random(f"engine {seed}")
        self._ratios = engine.steps.ratios if engine.steps is not None else ()
        self._at = self._left = 0

    def __call__(self, took_ns: int) -> int:
        if self._ratios:
            took_ns = int(took_ns * self._measured())
        if self._sigma:
            took_ns = int(took_ns * math.exp(self._rng.gauss(-(self._sigma**2) / 2, self._sigma)))
        if self._stragglers and self._rng.random() < self._stragglers:
            took_ns = int(took_ns * STRAGGLER_TIMES)
        return max(1, took_ns)

    def _measured(self) -> float:
        """The next of a run of measured ratios, then a run from elsewhere."""
        if not self._left:
            self._at, self._left = self._rng.randrange(len(self._ratios)), RUN
        self._left -= 1
        self._at = (self._at + 1) % len(self._ratios)
        return self._ratios[self._at]


PRESETS: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("e1", 8.0, 0.01, 0.1),
        Engine("e2", 8.0, 0.001, 0.05),
        Engine("e3", 3.0, 0.1, 0.3),
        Engine("static", 10.0, 0.02, 0.0, padded=True, step_ms=20.0, row_ms=0.2),
        Engine("gen", 20.0, 0.02, 0.2, iteration=True),
        Engine("fast", 6.0, 0.005, 0.05, iteration=True),
    )
}
MODES = ("sum", "padded", "iteration")


def engine_of(text: str) -> Engine:
    """A preset, or `a,b,m[,mode]` in milliseconds; `e1,padded` changes a preset's mode. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    mode = parts.pop() if parts[-1] in MODES else ""
    if len(parts) == 1 and parts[0] in PRESETS:
        engine = PRESETS[parts[0]]
    elif len(parts) == 3:
        try:
            a, b, m = (float(part) for part in parts)
        except ValueError:
            raise ConfigError(_unknown(text)) from None
        if not all(math.isfinite(value) and value >= 0 for value in (a, b, m)) or a + b + m <= 0:
            raise ConfigError(f"an engine's times are numbers of at least 0, and not all 0: {text!r}")
        engine = Engine(text, a, b, m)
    else:
        raise ConfigError(_unknown(text))
    if not mode:
        return engine
    return replace(engine, name=text, padded=mode == "padded", iteration=mode == "iteration")


def _unknown(text: str) -> str:
    return f"no engine {text!r}; there are {', '.join(PRESETS)}, or a,b,m in ms with a mode: 8,0.01,0.1,padded"


def capacity_rps(
    engine: Engine, load: Arrivals | ClosedLoop, *, workers: int, max_batch: int, max_rows: int, bypass_tokens: int
) -> float:
    """How many of these requests a second the workers can do at most, with full batches in order of arrival.

    Inputs over `bypass_tokens` run alone, as the core has it. An iteration-level engine is taken with all rows in use.
    """
    tokens: list[int] = load.tokens.tolist()
    max_new: list[int] = load.max_new.tolist()
    if engine.iteration:
        shared_ms = engine.a_ms / max_rows + engine.b_ms + engine.m_ms
        reads_ms = [max(engine.b_ms * t, engine.a_ms * t / engine.step_tokens / 2) for t in tokens]
        total_ms = sum(reads_ms) + sum(max(1, new) for new in max_new) * shared_ms
        return workers * len(tokens) * 1000.0 / total_ms
    total_ns = 0
    shorts: list[tuple[int, int]] = []
    for one in zip(tokens, max_new, strict=True):
        if one[0] > bypass_tokens:
            total_ns += engine.alone_ns(*one)
        else:
            shorts.append(one)
    for begin in range(0, len(shorts), max_batch):
        batch = shorts[begin : begin + max_batch]
        total_ns += engine.batch_ns([one[0] for one in batch], [one[1] for one in batch])
    return workers * len(tokens) * 1e9 / total_ns
