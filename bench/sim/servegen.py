"""ServeGen (Alibaba, NSDI'26): fitted arrival models, from which arrivals are drawn.

The file has a row for each client and window of ten minutes: the distribution of the intervals, Gamma or Weibull, with
shape and scale in seconds. Each client is a renewal process within its window and a tenant of its own; the first
interval of a window is entered at a random point, so that clients do not start together. Lengths are drawn from each
client's histogram if a lengths file is there (clients without one take from all), else from a lognormal.

Unless said otherwise the busiest hour is drawn: a whole day would be millions of requests.

Source: Xiang et al., ServeGen: Workload Characterization and Generation of LLM Serving in Production, 2025.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.bench.sim.arrivals import NS_PER_S, Arrivals, Ints, TraceError, ints, ordered, plain
from headway.bench.sim.traces import columns, json_lines, number, read_text, table

NEEDED = ("window_start_s", "rate_rps", "pattern", "shape", "scale")
WINDOW_S = 600.0
HOUR_S = 3600.0
DRAWN_MAX = 5_000_000  # requests from one file


@dataclass(frozen=True)
class Window:
    """One client for ten minutes."""

    client: int
    start_s: float
    rate_rps: float
    pattern: str
    shape: float
    scale_s: float


def is_servegen(header: list[str]) -> bool:
    """Whether these are its columns."""
    return {"window_start_s", "pattern", "shape"} <= {name.lower() for name in header}


def windows(path: Path) -> list[Window]:
    """The rows with arrivals. Raises TraceError."""
    header, rows, _ = table(path, read_text(path))
    start, rate, pattern, shape, scale = columns(path, header, NEEDED)
    client = header.index("client") if "client" in header else -1
    found = []
    for line, row in rows:
        where = f"{path}, line {line}"
        if len(row) < len(header):
            raise TraceError(f"{where}: {len(row)} columns, where the header has {len(header)}")
        if not number(row[rate], where) or not number(row[shape], where):
            continue
        if row[pattern].capitalize() not in ("Gamma", "Weibull"):
            raise TraceError(f"{where}: the pattern {row[pattern]!r} is neither Gamma nor Weibull")
        values = [number(row[place], where) for place in (start, rate, shape, scale)]
        who = int(number(row[client], where)) if client >= 0 else 0
        found.append(Window(who, values[0], values[1], row[pattern].capitalize(), values[2], values[3]))
    if not found:
        raise TraceError(f"{path}: no window has any arrivals")
    return found


def busiest_s(rows: list[Window], span_s: float) -> float:
    """When the span with the most expected arrivals starts."""
    expected: defaultdict[float, float] = defaultdict(float)
    for row in rows:
        expected[row.start_s] += row.rate_rps
    starts = sorted(expected)
    return max(starts, key=lambda s: sum(expected[t] for t in starts if s <= t < s + span_s))


def read(path: Path, *, start_s: float | None, span_s: float, lengths: Path | None, seed: int) -> Arrivals:
    """Arrivals drawn for the span; None: the busiest. Raises TraceError."""
    rows = windows(path)
    span_s = span_s or HOUR_S
    start = busiest_s(rows, span_s) if start_s is None else start_s
    rows = [row for row in rows if start - WINDOW_S < row.start_s < start + span_s]
    if sum(row.rate_rps for row in rows) * WINDOW_S > DRAWN_MAX:
        raise TraceError(f"{path}: more than {DRAWN_MAX:,} requests in {span_s:g} s; take a shorter span")
    rng = np.random.default_rng([seed, 1])
    times, who = [], []
    for row in rows:
        at = _draw(row, rng)
        at = at[(at >= start) & (at < start + span_s)]
        times.append(np.rint(at * NS_PER_S).astype(np.int64))
        who.append(np.full(len(at), row.client, np.int64))
    at_ns = np.concatenate(times) if times else ints([])
    if not len(at_ns):
        raise TraceError(f"{path}: nothing arrives in the {span_s:g} s from {start:g} s on")
    order = np.argsort(at_ns, kind="stable")
    clients, tenant = np.unique(np.concatenate(who)[order], return_inverse=True)
    tokens, output, how = _lengths(lengths, clients, ints(tenant), rng)
    drawn = plain(path.name, at_ns[order], tokens, output)
    names = tuple(f"client {client}" for client in clients)
    note = f"drawn from fitted models: {len(clients)} clients, {span_s:g} s from {start:g} s on; lengths {how}"
    return ordered(replace(drawn, tenant=ints(tenant), tenants=names), absolute=True).noted(note)


def _draw(row: Window, rng: np.random.Generator) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Arrival times of one client in one window, in seconds."""
    count = int(row.rate_rps * WINDOW_S * 1.5 + 50)
    parts, at = [], row.start_s
    end = row.start_s + WINDOW_S
    first = True
    while at < end:
        if row.pattern == "Gamma":
            gaps = rng.gamma(row.shape, row.scale_s, count)
        else:
            gaps = row.scale_s * rng.weibull(row.shape, count)
        if first:
            gaps[0] *= rng.random()
            first = False
        if not gaps.sum() > 0:
            break
        parts.append(at + np.cumsum(gaps))
        at = float(parts[-1][-1])
        if sum(map(len, parts)) > 20 * count:
            break  # a distribution with next to no mean: enough of it
    times = np.concatenate(parts) if parts else np.empty(0)
    return times[times < end]


def _lengths(
    path: Path | None, clients: "np.ndarray[tuple[int], np.dtype[np.int64]]", tenant: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints, str]:
    """Input and output tokens of each request, and where they are from."""
    if path is None:
        draw = rng.lognormal(5.0, 1.0, (2, len(tenant)))
        return ints(np.rint(draw[0]) + 1), ints(np.rint(draw[1]) + 1), "lognormal, around 150 tokens"
    known: dict[int, tuple[Ints, Ints]] = {}
    of = {int(client): index for index, client in enumerate(clients)}
    counts = np.bincount(tenant, minlength=len(clients))
    pool: list[dict[str, list[list[float]]]] = []
    for line, row in json_lines(path):
        try:
            client = of.get(int(row["client"]))
            pool.append({key: row[key] for key in ("input_tokens", "output_tokens")})
            if client is not None:
                known[client] = _sample(row, int(counts[client]), rng)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{path}, line {line}: not a client with its two histograms: {error!r}") from None
    if not pool:
        raise TraceError(f"{path}: there are no histograms in it")
    tokens, output = np.zeros(len(tenant), np.int64), np.zeros(len(tenant), np.int64)
    for index in range(len(clients)):
        drawn = known.get(index)
        if drawn is None:
            drawn = _sample(pool[index % len(pool)], int(counts[index]), rng)
        mine = tenant == index
        tokens[mine], output[mine] = drawn
    return tokens, output, f"from {path.name}"


def _sample(row: dict[str, list[list[float]]], count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    drawn = []
    for key in ("input_tokens", "output_tokens"):
        values, weights = np.asarray(row[key][0], float), np.asarray(row[key][1], float)
        drawn.append(ints(rng.choice(values, count, p=weights / weights.sum())))
    return drawn[0], drawn[1]
