"""What deciding costs: CPU time of one prediction, one report and one composed batch, the median of many.

The thread's own time, not the clock's, so that a busy machine does not change what is measured by much.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headway.policies.experts.composer import Waiting, balanced
from headway.policies.experts.predictor import Predictor
from headway.scheduler import clock

TOKENS = 512
ROUNDS = 200


class Cost(NamedTuple):
    """Median CPU time, and the limit it has to keep."""

    name: str
    microseconds: float
    limit: float


def _median_us(act: Callable[[int], object]) -> float:
    times = []
    for at in range(ROUNDS):
        started = clock.cpu_ns()
        act(at)
        times.append(clock.cpu_ns() - started)
    return float(np.median(times)) / 1e3


def measure(layers: int = 58, devices: int = 8) -> list[Cost]:
    """Predictions and reports of a deep model (all of its layers), batches of 32 from 128 on 8 sampled layers."""
    rng = np.random.default_rng(0)
    predictor = Predictor(layers, devices)
    texts = [rng.zipf(1.2, TOKENS) % 100_000 for _ in range(ROUNDS)]
    prompts = [predictor.prompt(text) for text in texts]
    loads = [rng.gamma(2.0, size=(layers, devices)) * TOKENS for _ in range(ROUNDS)]
    queue = Waiting(rng.gamma(2.0, size=(128, 8, devices)).astype(np.float32), [])
    return [
        Cost("learn", _median_us(lambda at: predictor.learn(prompts[at], loads[at], "tenant")), 400.0),
        Cost("predict", _median_us(lambda at: predictor.predict(prompts[at], "tenant")), 150.0),
        Cost("count a prompt", _median_us(lambda at: predictor.prompt(texts[at])), 150.0),
        Cost("compose", _median_us(lambda _: balanced(queue, 32)), 5_000.0),
    ]
