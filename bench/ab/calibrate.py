"""An engine for the simulator that costs what the real one does, and how far its times are from live ones.

The shape of the cost comes from a profile (`headway tune`) or is given. Where the trace is a recording, its endings say
how long each request took live: then one number, by which the whole cost is longer or shorter under traffic than when
it was measured, is found so that the simulated mean over the first half of the recording is the live one. The second
half was not looked at; the error stated is that of its mean and P95.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headway.bench.sim import recording
from headway.bench.sim.arrivals import Arrivals
from headway.bench.sim.compare import Setting, simulate
from headway.bench.sim.engines import Engine, engine_of
from headway.bench.sim.sources import kind_of, open_source
from headway.bench.sim.world import OK
from headway.scheduler.clock import NS_PER_MS
from headway.scheduler.config import ConfigError
from headway.scheduler.profile import Profile
from headway.scheduler.spec import ModelSpec

Floats = npt.NDArray[np.float64]

FACTOR_MAX = 16.0  # a profile that is further off than this is another machine's
HALVINGS = 14  # of the logarithm of FACTOR_MAX²: down to a thousandth
FIT_MAX = 4000  # requests that are simulated to find the factor
LIVE_MIN = 40  # endings that a calibration needs


@dataclass(frozen=True, eq=False)
class Traffic:
    """A load, and what is known of it live, in its order, NaN where nothing is: all empty if it is no recording."""

    load: Arrivals
    total_ms: Floats
    first_ms: Floats

    @property
    def live(self) -> bool:
        """Whether enough of it is known."""
        return int(np.isfinite(self.total_ms).sum()) >= LIVE_MIN


class Error(msgspec.Struct, frozen=True):
    """Of one figure over the held-out half: simulated / live - 1."""

    figure: str
    live_ms: float
    simulated_ms: float

    @property
    def share(self) -> float:
        """Positive: simulated is longer."""
        return self.simulated_ms / self.live_ms - 1


class Calibration(msgspec.Struct, frozen=True):
    """`factor`: what the cost was multiplied with."""

    factor: float
    fitted_on: int
    held_out: int
    errors: list[Error]


def engine_from(spec: ModelSpec, profile: Profile | None, text: str) -> Engine:
    """The simulated engine of a model: from its profile, or as `text` says. Raises ConfigError."""
    if text:
        return engine_of(text)
    if profile is None:
        raise ConfigError("say what the engine costs: --profile FILE (headway tune writes it), or --engine a,b,m,mode")
    a, b, m = (value / NS_PER_MS for value in profile.cost_ns)
    iteration = spec.kind == "generate"
    name = f"{profile.model} as tuned"
    return Engine(name, a, b, m, padded=not iteration, iteration=iteration, step_tokens=spec.step_tokens)


def traffic_of(source: str, model: str, *, seed: int) -> Traffic:
    """A trace or a recording; of a recording of several models, the one that is named. Raises ConfigError."""
    path = Path(source)
    if not path.is_file() or kind_of(path) != "recording":
        load = open_source(source, seed=seed)
        if not isinstance(load, Arrivals):
            raise ConfigError(f"{source} is a closed loop; compare windows on it with headway simulate --compare")
        return Traffic(load, np.empty(0), np.empty(0))
    load, found = recording.read(path), recording.entries(path)[0]
    assert load.row is not None  # a recording has them
    entries = [found[row] for row in load.row.tolist()]
    names = sorted({entry.came.model for entry in entries} - {""})  # without one: refused before it was known
    if len(names) > 1 and model not in names:
        raise ConfigError(f"{source} holds traffic of {', '.join(map(repr, names))}; say which with --model")
    chosen = model if model in names else "".join(names)
    keep = np.asarray([entry.came.model == chosen for entry in entries])
    if not keep.all():
        load = load.where(keep, f"model {chosen!r}")
        load = load.noted(
            f"{int((~keep).sum()):,} recorded requests were for other models or refused at once; left out"
        )
        entries = [entry for entry, kept in zip(entries, keep.tolist(), strict=True) if kept]
    total = [entry.went.total_ms if entry.went and entry.went.outcome == "ok" else math.nan for entry in entries]
    first = [entry.went.ttft_ms if entry.went and entry.went.ttft_ms is not None else math.nan for entry in entries]
    return Traffic(load, np.asarray(total, np.float64), np.asarray(first, np.float64))


def calibrated(traffic: Traffic, setting: Setting) -> tuple[Setting, Calibration]:
    """The setting under which the recording was made, its engine as fast as it was then. Raises ConfigError."""
    count = len(traffic.load)
    half = count // 2
    begin = max(0, half - FIT_MAX)
    fit = traffic.load.where(_between(count, begin, half), "the first half")
    known = np.isfinite(traffic.total_ms[begin:half])
    live_ms = float(traffic.total_ms[begin:half][known].mean())
    low, high = -math.log(FACTOR_MAX), math.log(FACTOR_MAX)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        total, _ = times_ms(fit, replace(setting, engine=scaled(setting.engine, math.exp(middle))))
        if float(np.nanmean(total[known])) < live_ms:
            low = middle
        else:
            high = middle
    factor = math.exp((low + high) / 2)
    if not 1.05 / FACTOR_MAX < factor < FACTOR_MAX / 1.05:
        raise ConfigError(f"live requests took {live_ms:.1f} ms on average; no factor up to {FACTOR_MAX:g} explains it")
    made = replace(setting, engine=scaled(setting.engine, factor))
    total, first = times_ms(traffic.load, made)
    errors = _errors("total", total[half:], traffic.total_ms[half:])
    if setting.engine.iteration:
        errors += _errors("first token", first[half:], traffic.first_ms[half:])
    return made, Calibration(factor, int(known.sum()), int(np.isfinite(traffic.total_ms[half:]).sum()), errors)


def times_ms(load: Arrivals, setting: Setting) -> tuple[Floats, Floats]:
    """Simulated times to the end and to the first token, NaN for who did not end well."""
    _, outcome = simulate(load, setting)
    at, first, done = (np.asarray(one, np.float64) for one in (outcome.at_ns, outcome.first_ns, outcome.done_ns))
    ok = np.asarray(outcome.ending) == OK
    total = np.where(ok, done - at, math.nan) / NS_PER_MS
    return total, np.where(ok & (first > 0), first - at, math.nan) / NS_PER_MS


def _between(count: int, begin: int, end: int) -> npt.NDArray[np.bool_]:
    places = np.arange(count)
    return (places >= begin) & (places < end)


def scaled(engine: Engine, factor: float) -> Engine:
    """The engine, everything in it `factor` times as long."""
    times = {name: getattr(engine, name) * factor for name in ("a_ms", "b_ms", "m_ms", "step_ms", "row_ms")}
    return replace(engine, **times)


def _errors(name: str, simulated: Floats, live: Floats) -> list[Error]:
    both = np.isfinite(simulated) & np.isfinite(live)
    if int(both.sum()) < LIVE_MIN // 2:
        return []
    sim, real = simulated[both], live[both]
    return [
        Error(f"mean {name}", float(real.mean()), float(sim.mean())),
        Error(f"P95 {name}", float(np.percentile(real, 95)), float(np.percentile(sim, 95))),
    ]
