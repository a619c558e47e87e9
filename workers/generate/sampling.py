"""Choosing the next token of each row of a mixed batch.

A greedy row takes the largest logit. A sampled row draws one uniform number made from its own seed and the index of the
token, and walks its own distribution with it: nothing a neighbour does, and nothing about where or when the step runs,
enters the draw, so that a request continued on another worker goes on with the tokens it would have had.

The order is that of Transformers: biases, then penalties (repetition, frequency, presence), end tokens muted until
`min_tokens`; and for sampled rows temperature, top_k, top_p, min_p. Logprobs are those of the model's own logits,
before all of this. On a CPU a sampled row is worked on alone: there nothing is won by stacking rows, and sums that do
not depend on the shape of a batch are equal to the last bit. On a GPU all rows go through each kernel together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from headway.scheduler.link import pack_logprobs
from headway.scheduler.params import LOGPROBS_MAX
from headway.scheduler.wire import Params
from headway.workers.generate.history import History

FEW, MANY = 64, 1024  # ranked first: FEW where top_k is no more; who needs more than MANY ranks the whole vocabulary
COLDEST = 1e-30  # a lower temperature would be 0 in float32; as cold as this, only the likeliest is left
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """How one request chooses: its params, narrowed, with a seed that is always there.

    `muted`: the ids that would end it, kept away until it has put out `min_tokens`. `logprobs`: how many alternatives
    to name beside the chosen token; -1: no logprobs at all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    muted: tuple[int, ...] = ()
    logprobs: int = -1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain(self) -> bool:
        """The largest logit of the model, nothing else to look at."""
        return self.greedy and not (self.bias or self.penalised or self.muted or self.logprobs >= 0)


class Subject(Protocol):
    """What is looked at of a request: `tokens`, its input and then its output, from `input_tokens` on."""

    @property
    def choice(self) -> Choice: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def input_tokens(self) -> int: ...

    @property
    def history(self) -> History: ...


class Pick(NamedTuple):
    """A chosen token; its logprobs, packed as in a link.Row, if they are asked for."""

    token: int
    logprobs: bytes | None = None


def choice_of(params: Params, seed: int, stops: frozenset[int] = frozenset()) -> Choice:
    """`params` as a Choice; `seed` is used where they name none. `stops`: ids, in the vocabulary, that end the text."""
    temperature = params.temperature or 0.0
    return Choice(
        temperature=max(temperature, COLDEST) if temperature else 0.0,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        seed=params.seed if params.seed is not None else seed,
        bias=tuple(params.logit_bias.items()),
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        muted=tuple(sorted(stops)) if params.min_tokens else (),
        logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def choose(logits: Any, rows: Sequence[Subject]) -> list[Pick | None]:
    """The next token of each row of `logits` [rows, vocabulary]; None where the model's logits are not finite.

    The one entry, for every way to run a model: `rows[i]` is the request that row i of `logits`, on any device and in
    any float dtype, belongs to. Nothing is changed, neither the logits nor, in what it says, a request.
    """
    best, tokens = logits.max(-1)
    finite: list[bool] = torch.isfinite(best).tolist()
    chosen: list[int] = tokens.tolist()
    odd = [at for at, row in enumerate(rows) if finite[at] and not row.choice.plain]
    if not odd:
        return [Pick(token) if good else None for token, good in zip(chosen, finite, strict=True)]
    ours = [rows[at] for at in odd]
    raw = logits[odd].float()
    picked = _pick(raw, best[odd].float(), [chosen[at] for at in odd], ours)
    named = _logprobs(raw, ours, picked)
    picks: list[Pick | None] = [Pick(token) if good else None for token, good in zip(chosen, finite, strict=True)]
    for at, token, logprobs in zip(odd, picked, named, strict=True):
        picks[at] = Pick(token, logprobs)
    return picks


def _pick(raw: Any, best: Any, likeliest: list[int], rows: Sequence[Subject]) -> list[int]:
    """The tokens of rows that are not plain. `raw`: their logits, float32; `best`, `likeliest`: the largest of each."""
    logits, chosen = _shaped(raw, rows), likeliest
    if logits is not raw:
        best, tokens = logits.max(-1)
        chosen = tokens.tolist()
    sampled = [at for at, row in enumerate(rows) if not row.choice.greedy]
    for among, fits in _WAYS:
        for part in _parts([at for at in sampled if fits(rows[at].choice)], logits.device):
            choices = [rows[at].choice for at in part]
            draws = [uniform(rows[at].choice.seed, len(rows[at].tokens) - rows[at].input_tokens) for at in part]
            some = slice(part[0], part[0] + 1) if len(part) == 1 else part  # a slice is not copied
            for at, token in zip(part, among(logits[some], best[some], choices, draws), strict=True):
                chosen[at] = token
    return chosen


def _parts(group: list[int], device: Any) -> list[list[int]]:
    """Which rows go through a kernel together: see above."""
    if device.type == "cpu":
        return [[at] for at in group]
    return [group] if group else []


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of `seed` and `index` alone (two rounds of splitmix64)."""
    state = _mix(seed & _MASK)
    return (_mix((state + index) & _MASK) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


# ---------------------------------------------------------------- before choosing


def _shaped(raw: Any, rows: Sequence[Subject]) -> Any:
    """`raw` with biases, penalties and muted tokens; the same object if no row has any."""
    bias = [(at, token, value) for at, row in enumerate(rows) for token, value in row.choice.bias]
    penalised = [at for at, row in enumerate(rows) if row.choice.penalised]
    muted = [(at, token) for at, row in enumerate(rows) if _is_muted(row) for token in row.choice.muted]
    if not (bias or penalised or muted):
        return raw
    logits = raw.clone()
    if bias:
        places, tokens, values = zip(*bias, strict=True)
        logits.index_put_(_where(logits, places, tokens), _floats(logits, values), accumulate=True)
    if penalised:
        _penalise(logits, penalised, rows)
    if muted:
        places, tokens = zip(*muted, strict=True)
        lowest = torch.finfo(logits.dtype).min  # not -inf: were every token muted, one of them must still be chosen
        logits.index_put_(_where(logits, places, tokens), _floats(logits, [lowest]))
    return logits


def _is_muted(row: Subject) -> bool:
    return len(row.tokens) - row.input_tokens < row.choice.min_tokens


def _penalise(logits: Any, at: Sequence[int], rows: Sequence[Subject]) -> None:
    """Repetition as in Transformers (Keskar et al., 2019), frequency and presence as in the OpenAI API, in place."""
    histories, lengths = [], []
    for place in at:
        row = rows[place]
        whole = row.choice.repetition_penalty != 1.0  # over the input too
        history = row.history.read(row.tokens, row.input_tokens, whole=whole)
        histories.append(history)
        lengths.append(len(history))
    ids, counts = History.joined(histories)
    if not len(ids):
        return
    ids, counts = ids.to(logits.device), counts.to(logits.device)
    spread = torch.tensor(lengths, device=logits.device)

    def each(values: Sequence[float]) -> Any:
        return _floats(logits, values).repeat_interleave(spread)

    choices = [rows[place].choice for place in at]
    where = (torch.tensor(list(at), device=logits.device).repeat_interleave(spread), ids)
    found = logits[where]
    repetition = each([choice.repetition_penalty for choice in choices])
    found = torch.where(found < 0, found * repetition, found / repetition)
    found -= each([choice.frequency_penalty for choice in choices]) * counts
    found -= each([choice.presence_penalty for choice in choices]) * (counts > 0)
    logits.index_put_(where, found)


def _where(logits: Any, places: Sequence[int], tokens: Sequence[int]) -> tuple[Any, Any]:
    return torch.tensor(places, device=logits.device), torch.tensor(tokens, device=logits.device)


def _floats(logits: Any, values: Sequence[float]) -> Any:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)


# ---------------------------------------------------------------- drawing


def _settings(logits: Any, choices: Sequence[Choice], draws: Sequence[float]) -> Any:
    """Temperature, top_k, top_p, min_p and draw of each row, as columns [rows, 1] of float64."""
    size = logits.shape[-1]
    table = [(c.temperature, c.top_k or size, c.top_p, c.min_p, draw) for c, draw in zip(choices, draws, strict=True)]
    return torch.tensor(table, dtype=torch.double, device=logits.device).unsqueeze(-1).unbind(1)


def _among_all(logits: Any, best: Any, choices: Sequence[Choice], draws: Sequence[float]) -> list[int]:
    """A token of each row, in the vocabulary's order; min_p cuts."""
    temperature, _, _, min_p, draw = _settings(logits, choices, draws)
    weights = _weights(logits, best, temperature)
    if any(choice.min_p for choice in choices):
        weights = torch.where(weights >= min_p.float(), weights, 0.0)
    found: list[int] = _walk(weights.double(), draw)[:, 0].tolist()
    return found


def _among_few(logits: Any, best: Any, choices: Sequence[Choice], draws: Sequence[float]) -> list[int]:
    return _among_ranked(logits, best, choices, draws, FEW)


def _among_many(logits: Any, best: Any, choices: Sequence[Choice], draws: Sequence[float]) -> list[int]:
    return _among_ranked(logits, best, choices, draws, MANY)


def _among_ranked(logits: Any, best: Any, choices: Sequence[Choice], draws: Sequence[float], most: int) -> list[int]:
    """A token of each row, likeliest first; top_k, top_p and min_p cut. `most`: how many are ranked."""
    temperature, top_k, top_p, min_p, draw = _settings(logits, choices, draws)
    weights = _weights(logits, best, temperature)
    size = weights.shape[-1]
    kept = min(most, size)
    ranked, order = weights.topk(kept)
    ranked = torch.where(torch.arange(kept, device=logits.device) < top_k, ranked.double(), 0.0)
    reached = ranked.cumsum(-1)
    whole = reached[:, -1:]
    if not all(choice.top_k for choice in choices):
        whole = torch.where(top_k < size, whole, weights.sum(-1, keepdim=True, dtype=torch.double))
    wanted = top_p * whole
    if kept < size and not all(0 < choice.top_k <= kept for choice in choices):
        short = ((reached[:, -1:] < wanted) | ((kept < top_k) & (top_k < size)))[:, 0].tolist()
        if any(short):
            return _reranked(logits, best, choices, draws, most, short)
    inside = (reached - ranked < wanted) & (ranked >= min_p)
    tokens: list[int] = order.gather(-1, _walk(torch.where(inside, ranked, 0.0), draw))[:, 0].tolist()
    return tokens


def _weights(logits: Any, best: Any, temperature: Any) -> Any:
    """exp(logit / temperature), the largest being 1: no temperature overflows."""
    return ((logits - best[:, None]) / temperature.float()).exp()


def _reranked(
    logits: Any, best: Any, choices: Sequence[Choice], draws: Sequence[float], most: int, short: Sequence[bool]
) -> list[int]:
    """The same, where `short` rows need a longer ranking."""
    found = [0] * len(choices)
    for wide in (False, True):
        part = [at for at, it in enumerate(short) if it is wide]
        if part:
            given = logits[part], best[part], [choices[at] for at in part], [draws[at] for at in part]
            tokens = _among_ranked(*given, logits.shape[-1] if wide else most)
            for at, token in zip(part, tokens, strict=True):
                found[at] = token
    return found


def _walk(weights: Any, draw: Any) -> Any:
    """The first entry [rows, 1] of each row of `weights` (float64) at which the running sum passes draw x the total."""
    reached = weights.cumsum(-1)
    found = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    return found.clamp(max=weights.shape[-1] - 1)


_WAYS = (  # by a row's own wishes alone, so that its neighbours do not decide how much of it is ranked
    (_among_all, lambda choice: not choice.top_k and choice.top_p >= 1.0),
    (_among_few, lambda choice: 0 < choice.top_k <= FEW),
    (_among_many, lambda choice: choice.top_k > FEW or (not choice.top_k and choice.top_p < 1.0)),
)


# ---------------------------------------------------------------- logprobs


def _logprobs(raw: Any, rows: Sequence[Subject], tokens: Sequence[int]) -> list[bytes | None]:
    """What rows that ask for logprobs are told: of the model's own distribution, whatever was chosen from."""
    named: list[bytes | None] = [None] * len(rows)
    for part in _parts([at for at, row in enumerate(rows) if row.choice.logprobs >= 0], raw.device):
        odds = raw[part].log_softmax(-1)
        taken = torch.tensor([tokens[at] for at in part], device=raw.device)
        chosen = odds.gather(-1, taken[:, None])[:, 0].tolist()
        top, top_ids = (found.tolist() for found in odds.topk(min(LOGPROBS_MAX, odds.shape[-1])))  # always as many:
        for place, at in enumerate(part):  # which of equals are named must not depend on what a neighbour asks for
            most = rows[at].choice.logprobs
            named[at] = pack_logprobs([chosen[place]], top_ids[place][:most], top[place][:most])
    return named
