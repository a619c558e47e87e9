"""From the word on the command line to a load: a trace file, told by what is in it, or made-up traffic with settings.

traces/AzureLLMInferenceTrace_conv.csv      a file
poisson:rps=50,n=20000,tokens=128           made-up; what is left out has the default shown by `DEFAULTS`
"""

from collections.abc import Callable
from pathlib import Path

from headway.bench.sim import recording, servegen, synthetic, traces
from headway.bench.sim.arrivals import Arrivals, TraceError
from headway.bench.sim.synthetic import ClosedLoop, Sizes

Load = Arrivals | ClosedLoop

SIZES = {"tokens": "128", "max_new": "0", "spread": "0"}
DEFAULTS: dict[str, dict[str, str]] = {
    "poisson": {"rps": "50", "n": "20000"},
    "pulses": {"burst": "3", "span_ms": "200", "idle_ms": "800", "n": "3000"},
    "onoff": {"rps": "100", "on_ms": "1000", "off_ms": "1000", "n": "20000"},
    "steps": {"rates": "20/200/20", "each_s": "20"},
    "closed": {"clients": "8", "think_ms": "2", "n": "5000"},
}


def open_source(
    text: str,
    *,
    seed: int = 0,
    start_s: float | None = None,
    span_s: float = 0.0,
    limit: int = 0,
    lengths: Path | None = None,
) -> Load:
    """The load called `text`, cut as asked. Raises TraceError."""
    name, _, settings = text.partition(":")
    if name in DEFAULTS:
        made = _made(name, settings, seed)
        if isinstance(made, ClosedLoop):
            if start_s or span_s or limit:
                raise TraceError("a closed loop cannot be cut; set how many requests it has: closed:n=2000")
            return made
        return made.cut(start_s=start_s or 0.0, span_s=span_s, limit=limit)
    path = Path(text)
    if not path.exists():
        raise TraceError(f"{text}: no such file, and no made-up traffic of that name ({', '.join(DEFAULTS)})")
    if path.is_dir():
        raise TraceError(f"{text}: a folder; name one file in it")
    kind = kind_of(path)
    if kind == "servegen":
        drawn = servegen.read(path, start_s=start_s, span_s=span_s, lengths=lengths or beside(path), seed=seed)
        return drawn.cut(limit=limit)
    return READERS[kind](path).cut(start_s=start_s or 0.0, span_s=span_s, limit=limit)


READERS: dict[str, Callable[[Path], Arrivals]] = {
    "csv": traces.read_csv,
    "jsonl": traces.read_jsonl,
    "recording": recording.read,
}


def kind_of(path: Path) -> str:
    """csv, jsonl, servegen or recording, by how the file begins."""
    with path.open("rb") as file:
        begin = file.read(1 << 16)
    if not begin.strip():
        raise TraceError(f"{path}: the file is empty")
    if 0x80 <= begin[0] <= 0x8F or begin[0] in (0xDE, 0xDF):
        return "recording"
    text = begin.decode("utf-8-sig", errors="replace").lstrip()
    if text.startswith("{"):
        return "jsonl"
    header, _, _ = traces.table(path, text.partition("\n")[0])
    return "servegen" if servegen.is_servegen(header) else "csv"


def beside(path: Path) -> Path | None:
    """The lengths that belong to a ServeGen file, if they lie beside it."""
    stem = path.name.removesuffix("_arrivals.csv")
    found = sorted(path.parent.glob(f"{stem}_lengths*.jsonl")) if stem != path.name else []
    return found[0] if found else None


# ---------------------------------------------------------------- made-up traffic


def _made(name: str, text: str, seed: int) -> Load:
    values = DEFAULTS[name] | SIZES
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key.strip() not in values:
            raise TraceError(f"{name}: {pair!r} is no setting; there are {', '.join(values)}, as in {name}:n=1000")
        values[key.strip()] = value.strip()
    sizes = Sizes(_int(values, "tokens", 1), _int(values, "max_new", 0), _float(values, "spread"))
    if name == "poisson":
        return synthetic.poisson(rps=_float(values, "rps"), n=_int(values, "n"), sizes=sizes, seed=seed)
    if name == "pulses":
        return synthetic.pulses(
            burst=_int(values, "burst"),
            span_ms=_float(values, "span_ms"),
            idle_ms=_float(values, "idle_ms"),
            n=_int(values, "n"),
            sizes=sizes,
            seed=seed,
        )
    if name == "onoff":
        on, off = _float(values, "on_ms"), _float(values, "off_ms")
        rps, n = _float(values, "rps"), _int(values, "n")
        return synthetic.on_off(rps=rps, on_ms=on, off_ms=off, n=n, sizes=sizes, seed=seed)
    if name == "steps":
        rates = tuple(_float({"rates": rate}, "rates") for rate in values["rates"].split("/"))
        return synthetic.steps(rates=rates, each_s=_float(values, "each_s"), sizes=sizes, seed=seed)
    clients, think = _int(values, "clients"), _float(values, "think_ms")
    return synthetic.closed(clients=clients, think_ms=think, n=_int(values, "n"), sizes=sizes, seed=seed)


def _float(values: dict[str, str], key: str) -> float:
    return traces.number(values[key], key)


def _int(values: dict[str, str], key: str, least: int = 1) -> int:
    value = int(_float(values, key))
    if value < least:
        raise TraceError(f"{key} must be at least {least}, not {values[key]}")
    return value
