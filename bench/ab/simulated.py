"""Two configurations on the same recorded traffic, simulated: the same arrivals meet each, and what differs is theirs.

Each figure is compared request by request: neighbouring requests are drawn in the same blocks from both runs, so that
what one burst did to both does not count as chance. The intervals say what could be if traffic of this kind came again,
not how right the simulator is: that is the calibration's error.
"""

import math
from dataclasses import replace

import msgspec
import numpy as np

from headway.bench.ab.calibrate import Calibration, Floats, Traffic, calibrated, engine_from, scaled, times_ms
from headway.bench.replay.compare import FIGURES, Difference, judged
from headway.bench.sim.compare import Setting, simulate
from headway.bench.sim.report import Report
from headway.scheduler.config import ConfigError
from headway.scheduler.profile import profile_of, tuned
from headway.scheduler.spec import WINDOW_KEYS, ModelSpec, ServerSpec


class Compared(msgspec.Struct, frozen=True):
    """`differences`: B against A. `calibration`: None where nothing live is known."""

    names: tuple[str, str]
    reports: tuple[Report, Report]
    differences: list[Difference]
    calibration: Calibration | None
    same: bool


def model_in(spec: ServerSpec, name: str) -> ModelSpec:
    """The model that is compared: the one of this name, or the only one. Raises ConfigError."""
    found = [model for model in spec.models if not name or model.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(model.name) for model in spec.models)
    raise ConfigError(f"which model? There {'are' if len(spec.models) > 1 else 'is'} {names}; say it with --model")


def setting_of(spec: ServerSpec, name: str, profile: str, engine: str, seed: int) -> Setting:
    """What the simulator needs of a configuration. Raises ConfigError, ProfileError."""
    model = model_in(spec, name)
    if profile:
        model = model.model_copy(update={"profile": profile})
    measured = profile_of(model)
    own = {key: value for key in WINDOW_KEYS if (value := getattr(model, key)) is not None}
    model = tuned(model, measured)
    return Setting(
        engine=engine_from(model, measured, engine),
        policy=spec.policy.model_copy(update=own),
        workers=max(1, model.workers),
        max_batch=model.max_batch,
        max_num_seqs=model.max_num_seqs,
        seed=seed,
    )


def compare(names: tuple[str, str], a: Setting, b: Setting, traffic: Traffic) -> Compared:
    """B against A, under which the recording was made, if it is one. Raises ConfigError."""
    calibration = None
    if traffic.live:
        a, calibration = calibrated(traffic, a)
        b = replace(b, engine=scaled(b.engine, calibration.factor))
    samples = [_samples(traffic, setting) for setting in (a, b)]
    rng = np.random.default_rng([a.seed, 12])
    found = []
    for figure, (column, number, needs) in FIGURES.items():
        if column not in samples[0]:
            continue
        both = np.isfinite(samples[0][column]) & np.isfinite(samples[1][column])
        of_a, of_b = (one[column][both] for one in samples)
        found.append(judged(figure, number, needs, of_a, of_b, rng, paired=True))
    done = [np.isfinite(one["e2el_ms"]).astype(np.float64) for one in samples]
    found.append(judged("completed_share", _mean, 1, done[0], done[1], rng, paired=True))
    reports = (simulate(traffic.load, a)[0], simulate(traffic.load, b)[0])
    same = all(np.array_equal(samples[0][key], samples[1][key], equal_nan=True) for key in samples[0])
    return Compared(names, reports, found, calibration, same)


def _samples(traffic: Traffic, setting: Setting) -> dict[str, Floats]:
    total, first = times_ms(traffic.load, setting)
    return {"e2el_ms": total, **({"ttft_ms": first} if setting.engine.iteration else {})}


def _mean(rows: Floats) -> Floats:
    return np.asarray(rows.mean(axis=1))


def worst_error(calibration: Calibration) -> float:
    """The largest share by which a simulated figure is off; NaN of none."""
    return max((abs(error.share) for error in calibration.errors), default=math.nan)
