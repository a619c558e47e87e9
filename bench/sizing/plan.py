"""The plan: a model, a device's memory, and what follows. Everything from the config; no weights are read.

plan = make_plan(read_config("config.json"), Wish(memory_bytes=80 << 30))
plan.parameters, plan.best.split, plan.best.memory.words()
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headway.bench.sizing import split as dividing
from headway.bench.sizing.devices import Device, Roof
from headway.bench.sizing.split import Shape, Split
from headway.bench.sizing.weights import Counted, Format, count, experts_of, format_of, kind_of
from headway.scheduler.config import ConfigError
from headway.workers import memory
from headway.workers.memory import LENGTHS, DoesNotFitError, MemoryPlan, size

COUNTED_MAX = 1 << 20  # requests at once are counted without the server's own limit
SEQS_MAX = 256  # recommended at most where nothing tells of the device's speed
LIKELY_TOKENS = 4096  # of a request, where a recommendation needs one number
REQUESTS_MIN = 16  # of LIKELY_TOKENS: below, a device is said to be too small for serving
NODE = 8  # devices that are joined fast enough for tensor parallelism
DEVICES_MAX = 512


@dataclass(frozen=True)
class Wish:
    """What is asked. `memory_bytes`: of one device, all of it free; `kv_dtype` auto: what the model computes in;
    `devices`: how many at most, 0: as many as it takes; `split`: this and no other. `cpu`: linear layers are
    packed for it, and a head that shares its weight with the embedding is then there twice."""

    memory_bytes: int
    dtype: str = "auto"
    kv_dtype: str = "auto"
    devices: int = 0
    split: Split | None = None
    step_tokens: int = 2048
    page_tokens: int = 16
    max_num_seqs: int = SEQS_MAX
    device: Device | None = None
    cpu: bool = False


@dataclass(frozen=True)
class Row:
    """Requests of `tokens`, input and output: how many `fit` at once (None: longer than the model's context), how many
    are recommended, and, where the device's speed is known, the least time of a step and the most tokens a second."""

    tokens: int
    fit: int | None
    batch: int | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Option:
    """One way to divide the model. `memory`: of the fullest device; None: `faults` say why not."""

    split: Split
    memory: MemoryPlan | None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def requests_at(self, tokens: int) -> int | None:
        """On all devices together; None past the model's context."""
        if self.memory is None or not self.memory.token_bytes:
            return 0 if self.memory is None else None
        if self.memory.context_tokens and tokens > self.memory.context_tokens:
            return None
        return self.memory.requests_at(tokens) * self.split.replicas

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        held = self.memory
        sizes = {} if held is None else asdict(held) | {"total_bytes": held.total_bytes, "kv_tokens": held.kv_tokens}
        return {
            "split": asdict(self.split),
            "devices": self.split.devices,
            "fits": held is not None,
            "memory": sizes,
            "requests": {str(length): self.requests_at(length) for length in LENGTHS},
            "faults": self.faults,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Plan:
    """All of it. `token_bytes`: of one token in the cache of the undivided model, as it is stored; `windowed_bytes`: of
    a request of each length, if layers with a sliding window kept no more than that window."""

    model: str
    kind: str
    wish: Wish
    form: Format
    counted: Counted
    shape: Shape
    context_tokens: int
    token_bytes: int
    windowed_bytes: dict[int, int]
    options: tuple[Option, ...]
    best: Option | None
    batches: tuple[Row, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    @property
    def parameters(self) -> int:
        return self.counted.total


def make_plan(config: Any, wish: Wish) -> Plan:
    """The plan for a Transformers config. Raises ConfigError for what cannot be planned at all."""
    kind, text = kind_of(config), config.get_text_config(decoder=True)
    form = format_of(config, wish.dtype)
    counted, shape = count(config, kind), dividing.shape_of(text)
    context = int(getattr(text, "max_position_embeddings", 0) or 0)
    generates = kind == "generate"
    stored = form.dtype if wish.kv_dtype == "auto" else wish.kv_dtype
    layers = memory.layers_of(text) if generates else ()
    options = tuple(
        _option(counted, shape, form, one, wish, context, stored, generates) for one in _splits(shape, wish)
    )
    best, reasons = _best(options, shape, wish, context, generates)
    plan = Plan(
        model=str(config.model_type),
        kind=kind,
        wish=wish,
        form=form,
        counted=counted,
        shape=shape,
        context_tokens=context,
        token_bytes=sum(layer.token_bytes(stored) for layer in layers),
        windowed_bytes={
            length: sum(one.token_bytes(stored) * min(length, one.window or length) for one in layers)
            for length in LENGTHS
            if any(one.window and one.window < length for one in layers)
        },
        options=options,
        best=best,
        reasons=tuple(reasons),
    )
    return plan if best is None else replace(plan, batches=tuple(_rows(plan, best, text)))


def _splits(shape: Shape, wish: Wish) -> Iterator[Split]:
    """Those worth looking at: powers of two, tensor parallelism within a node."""
    if wish.split is not None:
        yield wish.split
        return
    powers = [1 << n for n in range(DEVICES_MAX.bit_length())]
    most = wish.devices or DEVICES_MAX
    for tensor in (n for n in powers if n <= min(NODE, most)):
        yield Split(tensor)
        if shape.experts:
            yield from (Split(tensor, 1, n) for n in powers if 1 < n <= min(most, shape.experts) and n >= tensor)
        yield from (Split(tensor, n) for n in powers if 1 < n <= min(most // tensor, shape.layers))


def _option(
    counted: Counted, shape: Shape, form: Format, split: Split, wish: Wish, context: int, stored: str, generates: bool
) -> Option:
    faults, notes = dividing.check(shape, split)
    if faults:
        return Option(split, None, tuple(faults), tuple(notes))
    work = dividing.work_of(shape, split)
    cached = dividing.cached_of(shape, split, form.dtype, stored) if generates else memory.Cached(0, 0)
    seqs = -(-wish.max_num_seqs // split.replicas)
    twice = wish.cpu and generates and not counted.outside["head"]
    packed = form.weight_bytes(Counter(head=shape.vocab * int(shape.values["hidden_size"]))) if twice else 0
    try:
        held = memory.divide(
            free_bytes=wish.memory_bytes,
            weight_bytes=dividing.weight_bytes(counted, shape, split, form) + packed,
            work_bytes=work.step_bytes(form.dtype, wish.step_tokens if generates else context, seqs * generates),
            token_bytes=cached.token_bytes,
            gather_bytes=cached.layer_bytes,
            page_tokens=wish.page_tokens,
            max_num_seqs=COUNTED_MAX,
        )
    except DoesNotFitError as error:
        return Option(split, None, (str(error),), tuple(notes))
    return Option(split, replace(held, context_tokens=context), (), tuple(notes))


def _best(
    options: tuple[Option, ...], shape: Shape, wish: Wish, context: int, generates: bool
) -> tuple[Option | None, list[str]]:
    """The fewest devices that hold the model and some requests; of those the one with most room for the cache."""
    able = [one for one in options if one.memory is not None]
    if not able:
        return None, [_why_none(options, wish)]
    likely = min(LIKELY_TOKENS, context or LIKELY_TOKENS)
    roomy = [one for one in able if not generates or (one.requests_at(likely) or 0) >= REQUESTS_MIN]
    chosen = min(
        roomy or able, key=lambda one: (one.split.devices, one.split.pipeline, -(one.requests_at(likely) or 0))
    )
    count = chosen.split.devices
    reasons = [f"{count} device{'s' * (count > 1)} of {size(wish.memory_bytes)}: {chosen.split}"]
    if not roomy:
        reasons.append(f"few requests fit: {chosen.requests_at(likely)} of {likely} tokens")
    if fewer := [one for one in able if one.split.devices < count]:
        most = max(fewer, key=lambda one: one.requests_at(likely) or 0)
        reasons.append(
            f"{most.split} holds the weights, but only {most.requests_at(likely)} requests of {likely} tokens"
        )
    elif count > 1 and (single := next((one for one in options if one.split == Split()), None)):
        reasons.append(f"one device is not enough: {single.faults[0]}")
    if chosen.split.pipeline > 1:
        reasons.append("pipeline stages raise the time to a token; batches must be large enough to fill them")
    if chosen.split.expert > 1:
        reasons.append(f"{shape.experts // chosen.split.expert} of {shape.experts} experts on each device")
    return chosen, reasons + list(chosen.notes)


def _why_none(options: tuple[Option, ...], wish: Wish) -> str:
    last = options[-1]
    what = (
        str(last.split)
        if wish.split
        else f"nothing of up to {wish.devices or DEVICES_MAX} devices holds it; {last.split}"
    )
    return f"{what}: {'; '.join(last.faults)}"


def _rows(plan: Plan, best: Option, text: Any) -> Iterator[Row]:
    """What fits at each length, and how many of them to run at once."""
    assert best.memory is not None
    if not plan.token_bytes:
        free = int(plan.wish.memory_bytes * memory.SHARE) - best.memory.weight_bytes
        per_token = dividing.work_of(plan.shape, best.split).step_bytes(plan.form.dtype, 1, 0)
        for tokens in sorted({min(128, plan.context_tokens), plan.context_tokens}):
            texts = free // (per_token * tokens)
            yield Row(tokens, texts, min(plan.wish.max_num_seqs, 1 << (texts.bit_length() - 1)) if texts else None)
        return
    roof = _roof(plan, best, text)
    for tokens in LENGTHS:
        fit = best.requests_at(tokens)
        if not fit:
            yield Row(tokens, fit)
            continue
        most = min(fit, plan.wish.max_num_seqs)
        if roof is None:
            yield Row(tokens, fit, most)
            continue
        batch = roof.knee(tokens, most)
        step_s = roof.step_s(batch, tokens)
        yield Row(tokens, fit, batch, step_s * 1e3, batch / step_s)


def _roof(plan: Plan, best: Option, text: Any) -> Roof | None:
    if plan.wish.device is None:
        return None
    experts, chosen = experts_of(text)
    parts = plan.counted.parts
    whole = plan.form.weight_bytes(parts)
    parts["experts"] = 0
    fixed = plan.form.weight_bytes(parts)
    return Roof(
        plan.wish.device,
        best.split.devices // best.split.pipeline,
        fixed,
        whole - fixed,
        experts,
        chosen,
        plan.counted.active,
        plan.token_bytes,
    )


def memory_of(text: str) -> int:
    """Bytes of `80GiB`, `80GB`, `80G` or a plain number of bytes. Raises ConfigError."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    plain = text.strip().lower()
    digits = plain.rstrip("kmgtib ")
    unit = plain[len(digits) :].strip()
    scale = 1000 ** "kmgt".find(unit[0]) * 1000 if len(unit) == 2 and unit[0] in "kmgt" else units.get(unit[:1], 0)
    try:
        found = int(float(digits) * scale)
    except (ValueError, OverflowError):
        found = 0
    if found <= 0 or unit not in ("", "b", *(f"{letter}{end}" for letter in "kmgt" for end in ("", "b", "ib"))):
        raise ConfigError(f"--memory {text!r} is no size; write it as 80GiB, 80GB or 24g")
    return found
