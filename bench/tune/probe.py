"""The engine that is measured, in a process of its own, so that what kills it kills nothing else.

Started with a ModelSpec as JSON; reads one `Job` a line from standard input and answers each with one `Found` line. The
engine is the one that workers run, driven through the same four methods. Times are the engine's own reports: what the
scheduler would learn from.
"""

import os
import random
import resource
import sys
from collections.abc import Sequence

import msgspec

from headway.scheduler import link
from headway.scheduler.link import Done, Failed, Item, Step
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers.engine import Engine
from headway.workers.process import make_engine

STEPS_MAX = 100_000  # an engine that never ends is broken
NEW_MAX = 4096  # tokens of an answer while the prompts of the others are read
FIRST_ID = 3  # lower ids are often special


class About(msgspec.Struct, frozen=True):
    """What the probe says when its engine is ready; names as on a Card."""

    kind: str
    mode: str
    vocab_size: int
    max_input_tokens: int
    context_tokens: int
    kv_tokens: int
    prior_ns: tuple[float, ...]
    facts: dict[str, str]
    rss_bytes: int


class Job(msgspec.Struct, frozen=True):
    """`requests` at once, of `tokens` each; a generating engine goes on until it has run `steps` with all of them."""

    requests: int
    tokens: int
    steps: int
    seed: int


class Found(msgspec.Struct, frozen=True):
    """`batches`: (requests, tokens, nanoseconds) of each batch or step that read inputs; `steps`: of each step that
    only generated. `code` and `message`: why there is nothing."""

    batches: list[tuple[int, int, int]] = []
    steps: list[tuple[int, int, int]] = []
    code: str = ""
    message: str = ""
    peak_bytes: int = 0


def run(engine: Engine, job: Job) -> Found:
    """One job on the engine."""
    card, rng = engine.card, random.Random(job.seed)
    top = max(FIRST_ID + 1, card.vocab_size or 1000)
    params = None
    if card.kind == "generate":
        room = (card.context_tokens or NEW_MAX + job.tokens) - job.tokens
        params = Params(max_new_tokens=max(1, min(NEW_MAX, room)), temperature=0.0, ignore_eos=True)
    items = []
    for rid in range(job.requests):
        ids = [rng.randrange(FIRST_ID, top) for _ in range(job.tokens)]
        cut = len(ids) // 2 if card.kind == "score" else len(ids)
        items.append(Item(rid, ids=link.pack_ids(ids[:cut]), ids_pair=link.pack_ids(ids[cut:]), params=params))
    engine.add(1, items)
    return _driven(engine, job)


def _driven(engine: Engine, job: Job) -> Found:
    batches: list[tuple[int, int, int]] = []
    steps: list[tuple[int, int, int]] = []
    for _ in range(STEPS_MAX):
        if not engine.busy:
            return Found(batches, steps, peak_bytes=_peak_bytes())
        for report in engine.step():
            if isinstance(report, Failed):
                engine.cancel(1, range(job.requests))
                _empty(engine)
                return Found(code=report.code, message=report.message, peak_bytes=_peak_bytes())
            if isinstance(report, Done):
                if bad := next((one for one in report.outcomes if one.code), None):
                    return Found(code=bad.code, message=bad.message)
                batches.append((job.requests, report.tokens, report.compute_ns))
            elif isinstance(report, Step):
                if bad_row := next((row for row in report.rows if row.finish == "error"), None):
                    engine.cancel(1, range(job.requests))
                    _empty(engine)
                    return Found(code=bad_row.code, message=bad_row.message)
                _booked(report, batches, steps)
        if sum(1 for rows, _, _ in steps if rows == job.requests) >= job.steps:
            engine.cancel(1, range(job.requests))
            _empty(engine)
    raise RuntimeError(f"{job.requests} requests of {job.tokens} tokens were not done in {STEPS_MAX} steps")


def _booked(report: Step, batches: list[tuple[int, int, int]], steps: list[tuple[int, int, int]]) -> None:
    if not report.tokens:
        return
    ended = sum(1 for row in report.rows if row.finish)
    rows = report.running + ended  # `running` is counted when those who ended have left
    (steps if report.tokens == rows else batches).append((rows, report.tokens, report.compute_ns))


def _empty(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def _peak_bytes() -> int:
    """The most that this process has held: of the accelerator, if it uses one, else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def about(engine: Engine) -> About:
    """What there is to know of it before it is measured."""
    card = engine.card
    shared: dict[str, object] = {name: getattr(card, name) for name in About.__struct_fields__ if hasattr(card, name)}
    return msgspec.convert(shared | {"rss_bytes": _peak_bytes()}, About)


def main(arguments: Sequence[str]) -> None:
    """The spec as JSON. Ends with standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    engine = make_engine(ModelSpec.model_validate_json(arguments[0]))
    out.write(msgspec.json.encode(about(engine)) + b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        out.write(msgspec.json.encode(run(engine, msgspec.json.decode(line, type=Job))) + b"\n")
        out.flush()
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
