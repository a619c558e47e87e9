"""What a seed draws: a scheduler's settings, the services, and a list of happenings, each at its time.

All is drawn before anything runs, and no happening names what only the run will know: a cancel says "the seventh of
those alive, counted around". So any part of the list is a storm, too, and a failing list can be made short (`shrink`).
Nothing here knows the core. Times are microseconds from the start.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from headway.policies.views import BYPASS_TOKENS
from headway.policies.windows import MAKERS
from headway.scheduler.spec import PolicySpec

SERVICES = (  # (model, kind, iteration-level engine)
    ("chat", "generate", True),
    ("code", "generate", True),
    ("enc", "embed", False),
    ("enc", "score", False),
    ("own", "call", False),
)
CLIENTS = 5
TENANTS = ("", "", "red", "blue")
PEACE = 0.15  # share of seeds without failures: some laws can only be held there
TRAITS = ("", "poison", "late_poison", "culprit", "fails", "memory")  # what a request does to whoever runs it


class Ask(NamedTuple):
    """A request arrives. `deadline_ms`: from now; None: none. `trait`: one of TRAITS."""

    at_us: int
    service: int
    tokens: int
    max_new: int = 1
    deadline_ms: int | None = None
    priority: int = 0
    tenant: str = ""
    client: int = 0
    trait: str = ""


class Cancel(NamedTuple):
    """Somebody cancels. `of`: "live", "any" that ever was, or "none" that ever was."""

    at_us: int
    pick: int
    of: str


class Satisfy(NamedTuple):
    """The shell finds an answer complete."""

    at_us: int
    pick: int


class Vanish(NamedTuple):
    """A client is gone."""

    at_us: int
    client: int


class Join(NamedTuple):
    """A worker registers. `unruly`: chance of a fault in each of its reports; `forgetful`: of none ever coming."""

    at_us: int
    service: int
    max_batch: int = 8
    max_num_seqs: int = 16
    step_us: int = 5_000
    padded: bool = False
    kv_tokens: int = 0  # that its cache holds; 0: it does not say
    prior_ms: float = 0.0
    unruly: float = 0.0
    forgetful: float = 0.0
    deaf: float = 0.0  # chance that a heartbeat of its is lost


class Crash(NamedTuple):
    """A worker's process ends; `words`: what it had sent arrives afterwards; `orderly`: it left as it should."""

    at_us: int
    pick: int
    words: bool = False
    orderly: bool = False


class Stall(NamedTuple):
    """A worker stands still. `silent`: it does not even beat."""

    at_us: int
    pick: int
    ms: int
    silent: bool


class Rejoin(NamedTuple):
    """A worker is lost and registers again at once under a new number, in the middle of what it was running."""

    at_us: int
    pick: int


class Echo(NamedTuple):
    """An old report arrives again; `worker`, `batch`: as if from another worker, about another batch (0: unchanged)."""

    at_us: int
    pick: int
    worker: int = 0
    batch: int = 0


class Down(NamedTuple):
    """No worker will come for a service any more."""

    at_us: int
    service: int


class Drain(NamedTuple):
    """The scheduler is to end."""

    at_us: int
    limit_ms: int


class Pause(NamedTuple):
    """The scheduler itself stands still; all that happens meanwhile is noticed together."""

    at_us: int
    ms: int


class StepBack(NamedTuple):
    """The clock shows less than it did."""

    at_us: int
    ms: int


Happening = Ask | Cancel | Satisfy | Vanish | Join | Crash | Stall | Rejoin | Echo | Down | Drain | Pause | StepBack


class Plan(NamedTuple):
    """One storm. `lag_us`: how late the shell serves a wake-up; `together`: chance that happenings of one instant are
    noticed in one turn."""

    seed: int
    policy: PolicySpec
    services: tuple[tuple[str, str, bool], ...]
    lost_after_ms: int
    stuck_after_ms: int
    lag_us: int
    together: float
    happenings: tuple[Happening, ...]

    def __repr__(self) -> str:
        asks = sum(type(one) is Ask for one in self.happenings)
        return f"<Plan of seed {self.seed}: {len(self.happenings)} happenings, {asks} requests>"


def draw(seed: int, length: int | None = None) -> Plan:
    """The storm of a seed; `length`: how many happenings, drawn too if None."""
    rng = random.Random(f"storm {seed}")
    services = tuple(rng.sample(SERVICES, rng.choice((1, 1, 2, 3))))
    policy = _policy(rng)
    count = length or rng.randrange(40, 200)
    happenings: list[Happening] = [_join(rng, 0, index) for index in range(len(services)) if rng.random() < 0.9]
    pace = rng.choice(((0, 0, 1), (0, 1, 7, 40), (0, 1, 7, 40, 400), (0, 40, 400, 3_000)))
    moods = _moods(rng)
    at_us = 0
    for _ in range(count):
        at_us += rng.choice(pace) * 1_000 + rng.choice((0, 0, 137))
        kind = rng.choices(tuple(moods), tuple(moods.values()))[0]
        happenings += _DRAWN[kind](rng, at_us, len(services), policy)
    plan = Plan(
        seed=seed,
        policy=policy,
        services=services,
        lost_after_ms=rng.choice((400, 5_000)),
        stuck_after_ms=rng.choice((1_000, 20_000)),
        lag_us=rng.choice((0, 0, 300, 5_000)),
        together=rng.choice((0.0, 0.5, 1.0)),
        happenings=tuple(happenings),
    )
    return peaceful(plan) if rng.random() < PEACE else plan


def peaceful(plan: Plan) -> Plan:
    """The plan without failures of workers: what remains is load, and clients that change their minds."""
    kept: list[Happening] = []
    for one in plan.happenings:
        if isinstance(one, Join):
            kept.append(one._replace(unruly=0.0, forgetful=0.0, deaf=0.0))
        elif isinstance(one, Ask) and one.trait != "fails":
            kept.append(one._replace(trait=""))
        elif isinstance(one, (Ask, Cancel, Satisfy, StepBack, Vanish)):
            kept.append(one)
    return plan._replace(happenings=tuple(kept), lost_after_ms=5_000, stuck_after_ms=20_000)


def _policy(rng: random.Random) -> PolicySpec:
    return PolicySpec(
        window=rng.choice(tuple(MAKERS)),
        fixed_wait_ms=rng.choice((0.0, 5.0, 120.0)),
        aimd_target_ms=rng.choice((5.0, 100.0)),
        max_wait_cap_ms=rng.choice((1.0, 20.0, 100.0)),
        bypass_tokens=rng.choice((0, 64, 1024, 1024, 1024, "auto")),
        batch_size=rng.choice(("cost", "cost", "max")),
        batch_tokens_max=rng.choice((0, 0, 0, 600)),
        tenant_weights=rng.choice(({}, {}, {"red": 4.0})),
        long_concurrency=rng.choice((0, 0, 1, 3)),
        queue_max=rng.choice((1, 4, 32, 8192, 8192)),
        queue_tokens_max=rng.choice((500, 10_000, 1 << 24, 1 << 24)),
        in_flight_fraction=rng.choice((0.1, 0.7, 1.0)),
        poison_after=rng.choice((1, 2, 2, 3)),
    )


def _moods(rng: random.Random) -> dict[str, float]:
    """How often what happens in this storm: each fault is left out by some seeds and overdone by others."""
    moods = {"ask": 10.0, "burst": rng.choice((0.0, 1.0, 4.0)), "flood": rng.choice((0.0, 0.0, 0.4))}
    faults = {
        "cancel": 2.0,
        "satisfy": 0.5,
        "vanish": 0.4,
        "join": 0.8,
        "crash": 0.6,
        "stall": 0.5,
        "rejoin": 0.2,
        "echo": 1.0,
        "down": 0.1,
        "drain": 0.05,
        "pause": 0.2,
        "step_back": 0.2,
    }
    return moods | {name: weight * rng.choice((0.0, 1.0, 1.0, 3.0)) for name, weight in faults.items()}


def _ask(rng: random.Random, at_us: int, services: int, policy: PolicySpec) -> Ask:
    border = BYPASS_TOKENS if policy.bypass_tokens == "auto" else max(1, policy.bypass_tokens)
    return Ask(
        at_us=at_us,
        service=rng.randrange(services),
        tokens=rng.choice((1, 5, 5, 50, 50, 500, border, border + 1, 3 * border)),
        max_new=rng.choice((1, 2, 5, 12)),
        deadline_ms=rng.choice((-5, 0, 1, 20, 100, 400, 5_000)) if rng.random() < 0.25 else None,
        priority=rng.randrange(-3, 4) if rng.random() < 0.3 else 0,
        tenant=rng.choice(TENANTS),
        client=rng.randrange(CLIENTS),
        trait=rng.choice(TRAITS) if rng.random() < 0.12 else "",
    )


def _join(rng: random.Random, at_us: int, service: int) -> Join:
    return Join(
        at_us=at_us,
        service=service,
        max_batch=rng.choice((1, 2, 4, 8, 32)),
        max_num_seqs=rng.choice((1, 3, 8, 32)),
        step_us=rng.choice((500, 5_000, 60_000)),
        padded=rng.random() < 0.3,
        kv_tokens=rng.choice((0, 0, 300, 4_000)),
        prior_ms=rng.choice((0.0, 0.0, 8.0)),
        unruly=rng.choice((0.0, 0.1, 0.4)),
        forgetful=rng.choice((0.0, 0.0, 0.05)),
        deaf=rng.choice((0.0, 0.0, 0.5)),
    )


def _flood(rng: random.Random, at_us: int, services: int, policy: PolicySpec) -> list[Happening]:
    """One tenant sends very much, and just after it another the same."""
    ask = _ask(rng, at_us, services, policy)._replace(tokens=rng.choice((60, 600)), deadline_ms=None, trait="")
    return [ask._replace(tenant=tenant) for tenant in rng.sample(("", "red", "blue"), 2) for _ in range(30)]


def _drain(rng: random.Random, at_us: int, services: int, policy: PolicySpec) -> list[Happening]:
    """A drain, now and then one whose end the scheduler sleeps through while workers join."""
    if rng.random() < 0.5:
        return [Drain(at_us, rng.choice((0, 50, 2_000)))]
    asks: list[Happening] = [_ask(rng, at_us, services, policy) for _ in range(3)]
    joins = [_join(rng, at_us + 20_000, rng.randrange(services)) for _ in range(2)]
    return [*asks, Drain(at_us, 50), Pause(at_us + 10_000, 100), *joins]


_DRAWN: dict[str, Callable[[random.Random, int, int, PolicySpec], list[Happening]]] = {
    "ask": lambda rng, at, services, policy: [_ask(rng, at, services, policy)],
    "burst": lambda rng, at, services, policy: [_ask(rng, at, services, policy) for _ in range(rng.choice((2, 5, 17)))],
    "flood": _flood,
    "cancel": lambda rng, at, *_: [Cancel(at, rng.randrange(1 << 20), rng.choice(("live", "live", "any", "none")))],
    "satisfy": lambda rng, at, *_: [Satisfy(at, rng.randrange(1 << 20))],
    "vanish": lambda rng, at, *_: [Vanish(at, rng.randrange(CLIENTS))],
    "join": lambda rng, at, services, _: [_join(rng, at, rng.randrange(services))],
    "crash": lambda rng, at, *_: [Crash(at, rng.randrange(1 << 20), rng.random() < 0.3, rng.random() < 0.2)],
    "stall": lambda rng, at, *_: [
        Stall(at, rng.randrange(1 << 20), rng.choice((30, 500, 3_000, 30_000)), rng.random() < 0.5)
    ],
    "rejoin": lambda rng, at, *_: [Rejoin(at, rng.randrange(1 << 20))],
    "echo": lambda rng, at, *_: [
        Echo(at, rng.randrange(1 << 20), rng.choice((0, 0, rng.randrange(9))), rng.choice((0, 0, rng.randrange(99))))
    ],
    "down": lambda rng, at, services, _: [Down(at, rng.randrange(services))],
    "drain": _drain,
    "pause": lambda rng, at, *_: [Pause(at, rng.choice((1, 30, 700, 6_000)))],
    "step_back": lambda rng, at, *_: [StepBack(at, rng.choice((1, 50, 10_000)))],
}
