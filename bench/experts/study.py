"""What expert-aware scheduling is worth, against first come first served, a blind one, and one that knows.

    python -m headway.bench.experts.study [--recorded DIR] [--planted] [--seeds N] [--bursts N ...] [--json FILE]

Recorded routings (shared/traces/moe in or beside the checkout, or --recorded) and, with --planted, random-init models
with planted topics (needs torch; a minute). Simulated on a virtual clock; the predictor always learns online. Prints
tables, the targets with what was reached, and writes JSON and a picture. The exit code is 1 if a target is missed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from headway.bench.experts import composition, costs, guards, joining, overload, plots, prediction
from headway.bench.experts.composition import Composed
from headway.bench.experts.overload import Outcome, Policy, Scenario
from headway.bench.experts.prediction import Score
from headway.bench.experts.routings import Routings, recorded, stream
from headway.bench.pictures import drawn
from headway.policies.experts.composer import PASSES, WINDOW
from headway.policies.experts.placement import contiguous

MAIN = "dsv3_32"  # the recording that targets are stated for
DEVICES, TAKE = 8, 16
BURSTS = (1, 16, 64)
MARKS = (10, 20, 50, 100, 200, 350, 600, 1200, 2234)
CENTRAL = Policy("composed, open door", "open", "ours")
STEP = {16: -0.20, 1: -0.09}  # what a composed batch's expert part should take less
BATCHES = 100  # of one composition run
WAIT_MAX = WINDOW * (PASSES + 1) + 1  # batches: of a full queue, whatever the loads are
WIDTH_PIPED = 150  # columns where there is no terminal to ask


class Target(msgspec.Struct, frozen=True):
    """What was aimed at (at least, or at most, `limit`), and what was reached."""

    name: str
    reached: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it was."""
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit


def scenarios(requests: int, bursts: Sequence[int] = BURSTS) -> dict[str, tuple[Scenario, tuple[Policy, ...]]]:
    """Overloads by name, and who is compared in each."""
    doors = (overload.FIFO, overload.COMPOSED, overload.OURS, overload.ORACLE)
    central = (overload.FIFO_OPEN, CENTRAL, Policy("oracle", "open", "truth"))
    found: dict[str, tuple[Scenario, tuple[Policy, ...]]] = {
        "1.3x, one tenant 67%": (Scenario(1.3, hot_share=0.67, requests=requests), doors),
        "1.3x, 10% adversary": (Scenario(1.3, adversary=0.1, requests=requests), doors),
    }
    for burst in bursts:
        here = Scenario(1.3, burst=burst, requests=requests)
        found |= {
            _of("1.3x", burst): (here, overload.ALL),
            _of("2x", burst): (replace(here, load=2.0), doors),
            _of("2x, one tenant 67%", burst): (replace(here, load=2.0, hot_share=0.67), doors),
            _of("1.3x, unpredictable", burst): (replace(here, unpredictable=True), doors),
            _of("1.3x, flat", burst): (replace(here, flat=True), doors),
            _of("4 workers, 1.05x", burst): (replace(here, load=1.05, workers=4, requests=3 * requests), central),
        }
    return found


def _of(name: str, burst: int) -> str:
    return f"{name}, runs of {burst}"


class Findings(msgspec.Struct):
    """All that was measured on one model's routings."""

    name: str
    scores: list[Score]
    composed: dict[int, list[dict[str, Composed]]]  # burst -> seeds -> policies
    joined: dict[int, list[joining.Joined]]
    grouped: list[joining.Joined]
    overloads: dict[str, dict[str, list[Outcome]]]  # scenario -> policy -> seeds
    guarded: dict[str, float]


def measure(
    routings: Routings,
    seeds: int,
    requests: int,
    *,
    bursts: Sequence[int] = BURSTS,
    only_composition: bool = False,
) -> Findings:
    """Everything for one model; about 10 minutes of one core with three seeds and 6000 requests."""
    placement = routings.placement(DEVICES)
    marks = [mark for mark in MARKS if mark <= len(routings.train)]
    found = Findings(routings.name, prediction.compare(routings, DEVICES, marks), {}, {}, [], {}, {})
    predictor = composition.learned(routings.train, placement)
    for burst in bursts:
        drawn = [stream(routings.test, BATCHES * TAKE, burst=burst, seed=seed) for seed in range(seeds)]
        found.composed[burst] = [composition.compare(one, placement, predictor, TAKE) for one in drawn]
    if only_composition:
        return found
    for burst in bursts:
        texts = stream(routings.test, min(30 * 64, 4 * requests), burst=burst, seed=0)
        found.joined[burst] = [
            joining.run(policy, texts, placement, predictor, 64) for policy in ("fifo", "ours", "oracle")
        ]
    layers, experts = routings.train[0].counts.shape
    alone = contiguous(layers, experts, experts)
    by_expert = composition.learned(routings.train, alone)
    texts = stream(routings.test, min(60 * TAKE, 4 * requests), burst=1, seed=0)
    found.grouped = [
        joining.run(policy, texts, alone, by_expert, TAKE, grouping=True, queue=8)
        for policy in ("fifo", "ours", "oracle")
    ]
    for name, (scenario, policies) in scenarios(requests, bursts).items():
        runs = [overload.simulate(routings, scenario, policies, seed) for seed in range(seeds)]
        found.overloads[name] = {policy.name: [run[policy.name] for run in runs] for policy in policies}
    for how in ("none", "steady", "random", "rotating"):
        found.guarded[how] = guards.poisoned(routings, DEVICES, how=how, seed=0)
    found.guarded["exchanged"] = guards.exchanged(routings, DEVICES)
    found.guarded["newcomer"] = guards.newcomer(routings, DEVICES, overload.HOT_DOMAIN % routings.domains)
    return found


# ---------------------------------------------------------------- what was aimed at


def mean(outcomes: Sequence[Outcome], what: str) -> float:
    """Over seeds."""
    return float(np.mean([getattr(one, what) for one in outcomes]))


def success(outcomes: Sequence[Outcome], tenant: str, *, others: bool = False) -> float:
    """Share of a tenant's requests, or of the mean other tenant's, that were answered in time; nan if there is none."""
    found = [share for one in outcomes for name, share in one.success.items() if (name == tenant) != others]
    return float(np.mean(found)) if found else float("nan")


def targets(found: Findings, paid: Sequence[costs.Cost]) -> list[Target]:
    """The targets on the main recording."""
    at = {(score.name, score.requests): score.r2 for score in found.scores}
    last = max(score.requests for score in found.scores)
    step = {
        burst: float(np.mean([run["ours"].step_over(run["fifo"]) for run in runs]))
        for burst, runs in found.composed.items()
    }
    clean = found.guarded["none"]
    return [
        Target("R2 of the predictor", at["ours", last], 0.85, True),
        Target("R2 after 200 requests", at["ours", 200], 0.65, True),
        Target("R2 over the token table", at["ours", last] - at["token table", last], 0.08, True),
        Target("R2 over the tenant mean", at["ours", last] - at["tenant mean", last], 0.6, True),
        *[Target(f"MoE step, runs of {burst}", step[burst], STEP[burst]) for burst in step if burst in STEP],
        *[
            Target(f"longest wait of a composed batch's requests, runs of {burst}, batches", longest(runs), WAIT_MAX)
            for burst, runs in found.composed.items()
        ],
        *[aim for burst in found.composed for aim in _overload_targets(found.overloads, burst)],
        *[
            Target(f"poisoned ({how}): R2 lost", clean - found.guarded[how], 0.05)
            for how in ("steady", "random", "rotating")
        ],
        *[Target(f"{one.name}, microseconds", one.microseconds, one.limit) for one in paid],
    ]


def longest(runs: Sequence[Mapping[str, Composed]]) -> float:
    """The longest wait for a batch, in batches."""
    return float(max(run["ours"].wait_max for run in runs))


def _overload_targets(over: Mapping[str, Mapping[str, Sequence[Outcome]]], burst: int) -> list[Target]:
    """Those of the overloads whose domains come in runs of `burst`."""

    def runs(name: str) -> Mapping[str, Sequence[Outcome]]:
        return over[_of(name, burst)]

    def aim(words: str, reached: float, limit: float, at_least: bool = False) -> Target:
        return Target(f"{words} (runs of {burst})", reached, limit, at_least)

    ours, fifo, blind, tenant = overload.OURS.name, overload.FIFO.name, overload.COMPOSED.name, overload.HOT
    even, twice, hot = runs("1.3x"), runs("2x"), runs("2x, one tenant 67%")
    found = [
        aim("1.3x: tokens in time over FIFO with a blind door", _over(even, ours, fifo, "tokens"), 1.08, True),
        aim("1.3x: late", mean(even[ours], "late"), 0.005),
        aim("1.3x: longest wait over SLO", max(one.worst for one in even[ours]), 1.05),
        aim("2x: tokens in time over the blind door", _over(twice, ours, blind, "tokens"), 1.0, True),
        aim("2x, a tenant 67%: success of the others", success(hot[ours], tenant, others=True), 0.75, True),
        aim(
            "2x, a tenant 67%: its success over its blind level",
            success(hot[ours], tenant) / success(hot[blind], tenant),
            0.80,
            True,
        ),
        aim("2x, a tenant 67%: tokens in time over the blind door", _over(hot, ours, blind, "tokens"), 1.0, True),
    ]
    for control in ("unpredictable", "flat"):
        off = runs(f"1.3x, {control}")
        moved = abs(_over(off, ours, fifo, "tokens") - 1)
        found += [
            aim(f"{control}: tokens over FIFO, off by", moved, 0.01),
            aim(f"{control}: requests until it is off", max(one.off_after for one in off[ours]), 200),
        ]
    central = _over(runs("4 workers, 1.05x"), CENTRAL.name, overload.FIFO_OPEN.name, "p99")
    return [*found, aim("4 workers, 1.05x: P99 over FIFO", central, 0.5)]


def _over(runs: Mapping[str, Sequence[Outcome]], one: str, other: str, what: str) -> float:
    return mean(runs[one], what) / mean(runs[other], what)


# ---------------------------------------------------------------- for a person


def show(console: Console, found: Findings) -> None:
    """The tables of one model."""
    learning = Table(title=f"{found.name}: held-out R2 of device loads after so many requests")
    names = list(dict.fromkeys(score.name for score in found.scores))
    for head in ("requests", "tokens", *names):
        learning.add_column(head, justify="right")
    for mark in sorted({score.requests for score in found.scores}):
        row = {score.name: score for score in found.scores if score.requests == mark}
        learning.add_row(str(mark), f"{row['ours'].tokens:,}", *(f"{row[name].r2:.3f}" for name in names))
    console.print(learning)
    composed = Table(
        title=f"{found.name}: hottest device over mean, B={TAKE}, P={DEVICES} (time of the MoE step over FIFO)"
    )
    for head in ("runs of", *composition.POLICIES, "longest wait, batches"):
        composed.add_column(head, justify="right")
    for burst, runs in found.composed.items():
        cells = []
        for policy in composition.POLICIES:
            step = np.mean([run[policy].step_over(run["fifo"]) for run in runs])
            cells.append(f"{np.mean([run[policy].imbalance for run in runs]):.3f} ({step:+.1%})")
        composed.add_row(str(burst), *cells, str(max(run["ours"].wait_max for run in runs)))
    console.print(composed)
    for burst, joined in found.joined.items():
        words = ", ".join(f"{one.policy} {one.imbalance:.3f}" for one in joined)
        console.print(f"decoding, 64 at a time, runs of {burst}: hottest over mean in a step: {words}")
    if found.grouped:
        words = ", ".join(f"{one.policy} {one.experts:.1f}" for one in found.grouped)
        console.print(f"one device, {TAKE} at a time: distinct experts in a layer and step: {words}")
    for name, policies in found.overloads.items():
        _show_overload(console, f"{found.name}, {name}", policies)
    if found.guarded:
        words = ", ".join(f"{name} {value:.3f}" for name, value in found.guarded.items())
        console.print(f"R2 with 10% of reports hostile, and of a newcomer: {words}")


def _show_overload(console: Console, title: str, policies: Mapping[str, Sequence[Outcome]]) -> None:
    table = Table(title=f"{title} (requests and tokens in time over FIFO's capacity; times over the SLO)")
    hot = overload.HOT if any(overload.HOT in one.success for one in next(iter(policies.values()))) else ""
    heads = ("tokens", "requests", "shed", "late", "p50", "p99", "worst", "imbalance")
    for head in ("policy", *heads, *(("hot tenant", "others") if hot else ())):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for name, outcomes in policies.items():
        cells = [f"{mean(outcomes, head):.3f}" for head in heads]
        if hot:
            cells += [f"{success(outcomes, hot):.2f}", f"{success(outcomes, hot, others=True):.2f}"]
        table.add_row(name, *cells)
    console.print(table)


def folder_of(given: Path | None) -> Path | None:
    """Where the recordings lie: as said, or shared/traces/moe in or beside this checkout."""
    if given is not None:
        return given
    beside = (parent / "shared" / "traces" / "moe" for parent in Path(__file__).resolve().parents)
    return next((folder for folder in beside if folder.is_dir()), None)


def draw(path: Path, found: Findings) -> None:
    """The picture of one model. Raises ConfigError without matplotlib."""
    curves: dict[str, list[float]] = {"requests": []}
    for score in found.scores:
        if score.name == "ours":
            curves["requests"].append(score.requests)
        if score.name != "oracle":
            curves.setdefault(score.name, []).append(score.r2)
    plots.draw(path, found.name, {burst: runs[0] for burst, runs in found.composed.items()}, curves)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--recorded", type=Path, metavar="DIR", help="default: shared/traces/moe in or beside the checkout"
    )
    parser.add_argument("--planted", action="store_true", help="planted random-init models, too")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6000, help="of each overload")
    parser.add_argument("--bursts", type=int, nargs="+", default=BURSTS, help="mean length of one domain's runs")
    parser.add_argument("--json", type=Path, default=Path("experts_study.json"))
    parser.add_argument("--plot", type=Path, default=Path("experts_study.png"))
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED)
    folder = folder_of(args.recorded)
    all_found: list[Findings] = []
    aims: list[Target] = []
    for path in sorted(folder.glob("*.npz")) if folder else ():
        found = measure(recorded(path), args.seeds, args.requests, bursts=args.bursts)
        show(console, found)
        all_found.append(found)
        if path.stem == MAIN:
            aims += targets(found, costs.measure())
    if not folder:
        console.print("no recordings: shared/traces/moe is not there (--recorded)")
    if args.planted:
        from headway.bench.experts.planted import FAMILIES, hook_share, planted_routings

        aims.append(Target("telemetry's share of a decode step", hook_share(), 0.02))

        for family in FAMILIES:
            found = measure(
                planted_routings(family), args.seeds, args.requests, bursts=args.bursts, only_composition=True
            )
            show(console, found)
            all_found.append(found)
            aims.append(
                Target(f"R2 on {found.name}", [one.r2 for one in found.scores if one.name == "ours"][-1], 0.95, True)
            )
    for aim in aims:
        word = "[green]met[/]   " if aim.met else "[red]missed[/]"
        console.print(
            f"{word} {aim.name}: {aim.reached:.3f} ({'at least' if aim.at_least else 'at most'} {aim.limit:g})"
        )
    whole = {"targets": list(aims), "models": [_plain(found) for found in all_found]}
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    console.print(f"written: {args.json}")
    if all_found:
        drawn(console, args.plot, lambda: draw(args.plot, all_found[0]))
    return 0 if all(aim.met for aim in aims) else 1


def _plain(found: Findings) -> dict[str, Any]:
    """Without the single batches."""
    built: dict[str, Any] = msgspec.to_builtins(found, enc_hook=lambda array: array.tolist())
    for runs in built["composed"].values():
        for run in runs:
            for at, composed in run.items():
                run[at] = {"imbalance": composed[1], "wait_mean": composed[2], "wait_max": composed[3]}
    return built


if __name__ == "__main__":
    sys.exit(main())
