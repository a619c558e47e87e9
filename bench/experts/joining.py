"""Who joins a running batch: iteration-level generation on recorded routings, one token of each request in a step.

As many run as fit; whoever has decoded its text leaves, and at the next step others join from a queue that is always
full. The joiner's prompt is read at once. The measure is the hottest device over mean in each step, by the true experts
of the tokens decoded in it. With one device: how many distinct experts a step uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.bench.experts.routings import Routed
from headway.policies.experts.arrays import Floats, Loads
from headway.policies.experts.cost import Work
from headway.policies.experts.placement import Placement
from headway.policies.experts.policy import ExpertAware
from headway.policies.experts.predictor import Predictor, prompt_of
from headway.policies.experts.values import Forecast, Learned, Observed

REPORT_EVERY = 32  # decoded tokens between two reports
EXPERT_WORTH = 30  # as measured for Transformers' eager experts on a CPU; more on a GPU
KNOWN = Learned((), 1.0, 1 << 20)  # the predictor has learned, and is believed
PROMPT_SHARE = (0.5, 0.9)  # of a document that is its prompt


class Joined(NamedTuple):
    """One run: mean over steps of hottest over mean (devices), or of distinct experts in a layer (grouping)."""

    policy: str
    imbalance: float
    experts: float
    steps: int


@dataclass(slots=True)
class Text:
    """A request: a document, the first `prompt` tokens of which are given and the rest decoded."""

    rid: int
    document: Routed
    prompt: int
    forecast: object | None
    tenant: str = ""
    arrived_ns: int = 0
    deadline_ns: int = 1 << 62
    passed: int = 0
    at: int = 0  # the token that is decoded next
    reported: int = 0


def run(
    policy: str,
    documents: Sequence[Routed],
    placement: Placement,
    predictor: Predictor,
    slots: int,
    *,
    grouping: bool = False,
    queue: int = 4,
    seed: int = 0,
) -> Joined:
    """`policy`: fifo, ours or oracle (told what each will decode). The queue holds `queue` times `slots`.

    `grouping`: the predictor's groups are experts, and the placement is only used to count.
    """
    groups = predictor.groups
    experts = ExpertAware(predictor.layers, groups, slots, grouping=grouping, joining=True)
    tables = np.arange(predictor.groups)[None].repeat(predictor.layers, 0) if grouping else placement.share.argmax(2)
    experts.hear(KNOWN)
    if grouping:  # a device on which reading an expert's weights takes as long as EXPERT_WORTH of its tokens
        for tokens in range(1, 33):
            experts.hear(
                Learned(
                    work=Work(tokens, 0.0, 8.0 + tokens % 5),
                    spent_ns=100 * tokens + 100 * EXPERT_WORTH * (8 + tokens % 5),
                )
            )
    for _ in range(8):
        experts.worth.observe(2.0, composed=False)
    rng = np.random.default_rng(seed)
    texts = [_text(rid, one, tables, groups, predictor, policy, rng) for rid, one in enumerate(documents)]
    waiting, running = texts[: queue * slots], list[Text]()
    coming = iter(texts[queue * slots :])
    hottest, distinct, steps, batch = 0.0, 0.0, 0, 0
    while True:
        room = slots - len(running)
        if room:
            batch += 1
            window = waiting[: experts.window]
            taken, reason = (
                (list(range(room)), "fifo")
                if policy == "fifo"
                else experts.choose(window, len(waiting), room, batch * 2, 1, 0)
            )
            joined = [window[at] for at in taken]
            experts.started(joined, take=room, batch=batch, worker=1, reason=reason)
            if policy != "oracle":
                reports = [_prompt_report(batch, one, tables, groups) for one in joined]
                experts.hear(Learned(reports))
            gone = {one.rid for one in joined}
            waiting = [one for one in waiting if one.rid not in gone]
            running += joined
            more = [one for one, _ in zip(coming, range(room), strict=False)]
            if len(more) < room:
                break
            waiting += more
        loads = _step_loads(running, tables, groups)
        if steps >= 32:  # the first ones all started together
            hottest += float(loads.max(1).sum() / loads.mean(1).sum())
            distinct += float((loads > 0).sum(1).mean())
        steps += 1
        running = _advance(running, experts, tables, groups, told=policy == "ours")
    return Joined(policy, hottest / (steps - 32), distinct / (steps - 32), steps - 32)


def _text(
    rid: int,
    one: Routed,
    tables: npt.NDArray[np.int64],
    groups: int,
    predictor: Predictor,
    policy: str,
    rng: np.random.Generator,
) -> Text:
    prompt = max(8, int(one.tokens * rng.uniform(*PROMPT_SHARE)))
    load = predictor.predict(prompt_of(one.ids[:prompt], predictor.rows))
    if policy == "oracle":
        load = _counts(one.indices[prompt:], tables, groups) * np.float32(prompt / max(1, one.tokens - prompt))
    return Text(rid, one, prompt, Forecast(load, prompt, float(one.tokens - prompt)), at=prompt, reported=prompt)


def _counts(indices: npt.NDArray[np.int64], tables: npt.NDArray[np.int64], groups: int) -> Loads:
    """Loads [layers, groups] of tokens' `indices` [tokens, layers, top_k]."""
    layers = indices.shape[1]
    group = np.stack([tables[layer][indices[:, layer]] + layer * groups for layer in range(layers)])
    return np.bincount(group.reshape(-1), minlength=layers * groups).astype(np.float32).reshape(layers, groups)


def _step_loads(running: Sequence[Text], tables: npt.NDArray[np.int64], groups: int) -> Floats:
    return _counts(np.stack([one.document.indices[one.at] for one in running]), tables, groups)


def _prompt_report(batch: int, one: Text, tables: npt.NDArray[np.int64], groups: int) -> Observed:
    counts = _counts(one.document.indices[: one.prompt], tables, groups)
    return Observed(batch, one.rid, True, one.prompt, counts)


def _advance(
    running: list[Text], experts: ExpertAware, tables: npt.NDArray[np.int64], groups: int, *, told: bool
) -> list[Text]:
    """One token of each: who is done leaves, and every REPORT_EVERY tokens what was decoded is reported."""
    on = []
    for one in running:
        one.at += 1
        if one.at >= one.document.tokens:
            experts.ended(one.rid)
            continue
        on.append(one)
        if told and one.at - one.reported >= REPORT_EVERY:
            counts = _counts(one.document.indices[one.reported : one.at], tables, groups)
            experts.hear(Learned([Observed(0, one.rid, False, one.at - one.reported, counts)]))
            one.reported = one.at
    return on
