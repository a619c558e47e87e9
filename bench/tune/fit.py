"""From what was tried to a cost, a recommendation with its reasons, and a profile.

The cost is that of `scheduler/latency.py`, learned from all batches and steps in a drawn order, as the scheduler would
from traffic; how far it is from each of them is said with it. Recommended is the fewest requests at once that reach
ENOUGH of the best rate: more would make each of them slower for little.
"""

import random
from collections.abc import Sequence
from statistics import median

from headway.bench.tune.measure import Tried
from headway.bench.tune.probe import About
from headway.policies.views import Cost
from headway.scheduler.clock import NS_PER_MS
from headway.scheduler.latency import CostModel
from headway.scheduler.profile import Profile, Recommended
from headway.scheduler.spec import ModelSpec

ENOUGH = 0.9
QUIET = 0.15  # by which passes of the same size may differ
ROUNDS = 4  # through all reports: there are few, and the model weighs its first ones lightly

Report = tuple[int, int, int]


def reports_of(tried: Sequence[Tried]) -> list[Report]:
    """(requests, tokens, nanoseconds) of every batch and step."""
    return [one for each in tried for one in (*each.found.batches, *each.found.steps)]


def cost_of(reports: Sequence[Report], seed: int) -> Cost:
    """The cost learned from them."""
    model, rng = CostModel(), random.Random(f"tune {seed}")
    for _ in range(ROUNDS):
        for requests, tokens, took_ns in rng.sample(reports, len(reports)):
            model.observe(requests, tokens, took_ns)
    return model.central


def errors(cost: Cost, reports: Sequence[Report]) -> dict[str, float]:
    """How far the cost is from each report, as a share of what was measured: median and worst of twenty."""
    shares = sorted(abs(cost.batch_ns(n, tokens) - took) / took for n, tokens, took in reports if took > 0)
    if not shares:
        return {}
    return {"median": round(median(shares), 4), "p95": round(shares[min(len(shares) - 1, int(0.95 * len(shares)))], 4)}


def unrest(tried: Sequence[Tried]) -> float:
    """How far passes of the same size are apart, as a share of its time: the median over sizes."""
    apart = [(max(one.passes_ms) - min(one.passes_ms)) / one.took_ms for one in tried if len(one.passes_ms) > 1]
    return median(apart) if apart else 0.0


def size_for(tried: Sequence[Tried], tokens: int, took_ms_max: float | None) -> tuple[int, str]:
    """How many requests of this length at once, and why."""
    good = [one for one in tried if one.tokens == tokens and one.ended == "ok"]
    able = [one for one in good if took_ms_max is None or one.took_ms <= took_ms_max]
    if not good:
        return 1, f"{tokens} tokens: nothing was measured"
    if not able:
        return 1, f"{tokens} tokens: even one alone takes {good[0].took_ms:.1f} ms, more than {took_ms_max:g} ms"
    best = max(able, key=lambda one: one.rate)
    chosen = next(one for one in able if one.rate >= ENOUGH * best.rate)
    alone = good[0]
    why = (
        f"{tokens} tokens: {chosen.requests} at once reach {chosen.rate:,.1f}/s, {chosen.rate / alone.rate:.1f} times "
        f"one alone, in {chosen.took_ms:.1f} ms"
    )
    if best is not chosen:
        why += f"; {best.requests} would bring {best.rate / chosen.rate - 1:.0%} more and take {best.took_ms:.1f} ms"
    last = [one for one in tried if one.tokens == tokens][-1]
    if last.ended != "ok":
        why += f"; {last.requests}: {last.ended.replace('_', ' ')}"
    elif took_ms_max is not None and len(able) < len(good):
        why += f"; more at once take longer than {took_ms_max:g} ms"
    return chosen.requests, why


def profile_from(
    spec: ModelSpec, about: About, tried: Sequence[Tried], *, ended_by: str, took_ms_max: float | None, seed: int
) -> Profile:
    """All of it as a profile. Raises ValueError if nothing could be measured."""
    reports = reports_of(tried)
    if not reports:
        raise ValueError("nothing could be measured")
    cost = cost_of(reports, seed)
    lengths = sorted({one.tokens for one in tried})
    sizes = {tokens: size_for(tried, tokens, took_ms_max) for tokens in lengths}
    chosen = max(size for size, _ in sizes.values())
    iteration = about.mode == "iteration"
    known = Recommended(max_num_seqs=chosen) if iteration else Recommended(max_batch=chosen)
    error = errors(cost, reports)
    reasons = [why for _, why in sizes.values()]
    reasons.append(
        f"{'max_num_seqs' if iteration else 'max_batch'} {chosen}: the most that pays at any length; longer ones are "
        + ("bounded by the KV cache" if iteration else "cut by their cost")
    )
    a, b, m = (value / NS_PER_MS for value in cost[:3])
    reasons.append(
        f"a {'step' if iteration else 'batch'} takes {a:.3f} ms + {b:.4f} x tokens + {m:.4f} x requests; off by "
        f"{error['median']:.0%} (median), {error['p95']:.0%} (one in twenty is worse)"
    )
    reasons.append(f"measuring ended: {ended_by}")
    if (apart := unrest(tried)) > QUIET:
        reasons.append(
            f"passes of the same size differ by {apart:.0%}: the machine was not quiet; measure again when it is"
        )
    peak = max((one.found.peak_bytes for one in tried), default=0)
    return Profile(
        headway_profile=1,
        model=spec.model,
        engine=spec.engine,
        cost_ns=(cost.a_ns, cost.b_ns, cost.m_ns),
        recommended=known,
        facts=about.facts,
        error=error,
        memory={"loaded_bytes": about.rss_bytes, "peak_bytes": peak, "kv_tokens": about.kv_tokens},
        measured={
            str(tokens): {
                str(one.requests): round(one.took_ms, 3) for one in tried if one.tokens == tokens and one.rate
            }
            for tokens in lengths
        },
        reasons=tuple(reasons),
    )
