"""Many texts through an encoder or a classifier in padded rectangles: what embed, classify and score have in common.

A batch is sorted by length and cut where its cost is least (`cuts.py`); each group runs as one rectangle, padded on the
right; answers go back in the order of the requests. A text that is no valid input, or whose answer is not finite, fails
alone. A rectangle that raises is halved until the culprit is alone; if every text failed, the batch has. What the rows
mean (a vector, class scores) is the caller's: `embed.py`, `classify.py`.

Padding must not change an answer. That is tried once at start, two texts together against each alone; for a model whose
answers it changes (one that ignores the attention mask, or convolves over it) only texts of equal length run together.
"""

import inspect
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from headway.scheduler import clock
from headway.scheduler.errors import HeadwayError
from headway.scheduler.link import Card, Item, Outcome, unpack_ids
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import INPUT_IDS_MAX
from headway.workers.cuts import Cutter
from headway.workers.engine import Engine
from headway.workers.load import Loaded
from headway.workers.oneshot import OneShot, Routing, code_of, device_lost, text_of
from headway.workers.routing import Telemetry, placement_of, watch

log = logging.getLogger("headway.worker")

WARM_TEXTS, WARM_TOKENS = 4, 32
PROBE_TOKENS = (5, 19)  # of the two texts that are run together and alone
NEAR = {torch.float32: 1e-4}  # how far padding may move an answer, as a share of the largest number in it
NEAR_HALF = 5e-2


class Text(NamedTuple):
    """One input. `second`: where the second text of a pair begins; the length of `ids` if there is none."""

    ids: list[int]
    second: int
    rid: int = 0


class Rectangle(NamedTuple):
    """Texts padded to the longest. `mask` [rows, width] is True for tokens, `lengths` [rows] counts them; `inputs` are
    the model's keyword arguments; `pad` fills the rest."""

    inputs: dict[str, Any]
    mask: Any
    lengths: Any
    pad: int


class Padded:
    """Runs items through `forward`: a Rectangle in, one row for each text out, in order.

    `answer(rid, row)` makes the outcome of a row (float32, on the CPU, finite). `input_max`: longest input in tokens.
    `types`: the second text of a pair has token type 1. `routing`: counts which experts each text's tokens took.
    """

    def __init__(
        self,
        loaded: Loaded,
        forward: Callable[[Rectangle], Any],
        answer: Callable[[int, Any], Outcome],
        input_max: int,
        types: bool = False,
        routing: Telemetry | None = None,
    ) -> None:
        self._forward = forward
        self._answer = answer
        self._device = loaded.device
        self._vocab_size = loaded.vocab_size
        config = loaded.model.config.get_text_config()
        pad = getattr(config, "pad_token_id", None)
        self._pad: int | None = pad if isinstance(pad, int) and 0 <= pad < loaded.vocab_size else None
        self._end: int | None = next((token for token in sorted(loaded.eos) if token < loaded.vocab_size), None)
        taken = inspect.signature(loaded.model.forward).parameters
        self._masked = "attention_mask" in taken
        self._typed = types and "token_type_ids" in taken
        self._fixed = {"use_cache": False} if "use_cache" in taken else {}
        self._computed = 0
        self.input_max = input_max
        self._telling: list[tuple[Text, Any]] = []  # of the last run: texts, and the counts of their experts
        self._critical = self._active = 0
        self.routing = self._counts_right(routing)
        began_ns = clock.now_ns()
        self.prior_ns = self._timed()
        self._cutter = Cutter(self.prior_ns, padding=self._harmless(NEAR.get(loaded.dtype, NEAR_HALF)))
        log.info("warmed up in %.1f s: %r", (clock.now_ns() - began_ns) / clock.NS_PER_S, self)

    def __repr__(self) -> str:
        return f"<Padded {self._cutter!r}>"

    @property
    def facts(self) -> dict[str, str]:
        """What to tell people."""
        padding = "sorted by length, cut by cost" if self._cutter.padding else "none: it changes this model's answers"
        return {"padding": padding}

    def run(self, items: Sequence[Item]) -> list[Outcome | BaseException]:
        """One outcome for each item, in order. Raises what went wrong if not one text could be computed."""
        self._computed = self._critical = self._active = 0
        self._telling.clear()
        outcomes: list[Outcome | BaseException] = []
        good: list[tuple[int, Text]] = []
        for item in items:
            text = self._checked(item)
            if isinstance(text, Text):
                good.append((len(outcomes), text))
                outcomes.append(Outcome(item.rid))
            else:
                outcomes.append(text)
        faults: list[Exception] = []
        for group in self._cutter.cut([len(text.ids) for _, text in good]):
            members = [good[at] for at in group]
            for (place, _), row in zip(members, self._rows([text for _, text in members], faults), strict=True):
                outcomes[place] = self._outcome(items[place].rid, row)
        if good and len(faults) == len(good):
            raise faults[0]
        return outcomes

    def routed(self, batch: int) -> Routing:
        """What the last run says of experts, as part of `batch`."""
        assert self.routing is not None
        reports = [self.routing.report(batch, text.rid, len(text.ids), counts) for text, counts in self._telling]
        return Routing(reports, self._critical, self._active)

    def computed(self, items: Sequence[Item]) -> int:  # noqa: ARG002
        """Tokens that the last run computed, padding included."""
        return self._computed

    # ------------------------------------------------------------ rectangles

    def _rows(self, texts: Sequence[Text], faults: list[Exception]) -> list[Any]:
        """A row, or what went wrong, for each text; each thing that went wrong goes into `faults`, too."""
        width = max(len(text.ids) for text in texts)
        began_ns = clock.now_ns()
        try:
            rows = self._run(texts)
            counts = self.routing.count_padded(_mask_of(texts)) if self.routing is not None else None
        except Exception as error:
            if device_lost(error):
                raise
            fault = error.with_traceback(None)  # it holds the tensors that did not fit
        else:
            self._computed += len(texts) * width
            if self.routing is not None and counts is not None:
                self._telling += zip(texts, counts, strict=True)
                self._critical += self.routing.critical
                self._active += self.routing.active
            self._cutter.observe(len(texts), width, clock.now_ns() - began_ns)
            return list(rows)
        if len(texts) == 1:
            faults.append(fault)
            return [fault]
        if code_of(fault) == "out_of_memory":
            self._cutter.out_of_memory(len(texts), width)
            log.warning("%d texts of up to %d tokens do not fit into memory; now %r", len(texts), width, self._cutter)
        half = len(texts) // 2
        return self._rows(texts[:half], faults) + self._rows(texts[half:], faults)

    @torch.inference_mode()
    def _run(self, texts: Sequence[Text]) -> Any:
        """Rows [texts, ...], float32, on the CPU."""
        return self._forward(self._rectangle(texts)).float().cpu()

    def _rectangle(self, texts: Sequence[Text]) -> Rectangle:
        device = self._device
        width = max(len(text.ids) for text in texts)
        pad = self._pad if self._pad is not None else _unlike_ends(texts)
        ids = torch.tensor([text.ids + [pad] * (width - len(text.ids)) for text in texts], device=device)
        lengths = torch.tensor([len(text.ids) for text in texts], device=device)
        mask = _mask(lengths, width)
        inputs = {"input_ids": ids, **self._fixed}
        if self._masked:
            inputs["attention_mask"] = mask.long()
        if self._typed:
            second = torch.tensor([text.second for text in texts], device=device)
            inputs["token_type_ids"] = ((torch.arange(width, device=device) >= second[:, None]) & mask).long()
        return Rectangle(inputs, mask, lengths, pad)

    def _outcome(self, rid: int, row: Any) -> Outcome | BaseException:
        if isinstance(row, Exception):
            return row
        if not torch.isfinite(row).all():
            return HeadwayError("engine_error", "the model computed an answer that is not finite")
        return self._answer(rid, row)

    def _checked(self, item: Item) -> Text | HeadwayError:
        try:
            first, pair = unpack_ids(item.ids), unpack_ids(item.ids_pair)
        except ValueError:
            return HeadwayError("invalid_request", "token ids are not whole 32-bit integers")
        ids = first + pair
        if not ids:
            return HeadwayError("invalid_request", "the input is empty")
        if max(ids) >= self._vocab_size:
            text = f"token id {max(ids)} is outside the vocabulary of {self._vocab_size}"
            return HeadwayError("invalid_request", text)
        if len(ids) > self.input_max:
            return HeadwayError("too_long", f"the input has {len(ids)} tokens; the limit is {self.input_max}")
        return Text(ids, len(first), item.rid)

    # ------------------------------------------------------------ at start

    def _counts_right(self, routing: Telemetry | None) -> Telemetry | None:
        """The same, if each position of a rectangle goes through each router once; else counts would be no one's."""
        if routing is None:
            return None
        texts = [self._made_up(tokens, random.Random(2)) for tokens in (3, 3)]
        self._run(texts)
        try:
            if routing.count_padded(_mask_of(texts)) is not None:
                return routing
            why = "not all of its routers are run"
        except ValueError as error:
            why = str(error)
        log.warning("the load of this model's experts is not reported: %s", why)
        routing.stop()
        return None

    def _made_up(self, tokens: int, rng: random.Random) -> Text:
        """A text of `tokens` tokens, or as many as there may be, that ends as the model's texts do."""
        pad, tokens = self._pad, min(tokens, self.input_max)
        ids = [token for token in (rng.randrange(self._vocab_size) for _ in range(4 * tokens)) if token != pad][:tokens]
        ids = ids or [0]
        return Text(ids if self._end is None else [*ids[:-1], self._end], len(ids))

    def _timed(self) -> tuple[float, float, float]:
        """A first guess of a rectangle's cost: fixed, per token, per text (ns)."""
        rng = random.Random(0)
        long = min(WARM_TOKENS, self.input_max)
        one, longer, many = (
            self._fastest_ns([self._made_up(tokens, rng)] * texts)
            for texts, tokens in ((1, 2), (1, long), (WARM_TEXTS, long))
        )
        per_token = max(0.0, (longer - one) / max(1, long - 2))
        per_text = max(0.0, (many - longer) / (WARM_TEXTS - 1) - per_token * long)
        return max(0.0, one - 2 * per_token - per_text), per_token, per_text

    def _fastest_ns(self, texts: Sequence[Text]) -> int:
        times = []
        for _ in range(3):
            began_ns = clock.now_ns()
            self._run(texts)
            times.append(clock.now_ns() - began_ns)
        return min(times)

    def _harmless(self, near: float) -> bool:
        """Whether a text has the same answer padded as alone. Raises what the model raises for one text alone."""
        rng = random.Random(1)
        probes = [self._made_up(tokens, rng) for tokens in PROBE_TOKENS]
        alone = torch.cat([self._run([probe]) for probe in probes])
        try:
            together = self._run(probes)
        except Exception as error:
            why = text_of(error)
        else:
            apart = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
            if apart <= near:
                return True
            why = f"they differ by {apart:.1g} of their size"
        log.warning("padding changes the answers of this model (%s): only texts of equal length run together", why)
        return False


def engine_of(spec: ModelSpec, kind: str, loaded: Loaded, padded: Padded, facts: dict[str, str], **card: Any) -> Engine:
    """The engine that runs batches through `padded`. `card`: what else its card says."""
    said = {"tokenizer": loaded.tokenizer} | card
    routing = padded.routing
    whole = Card(
        name=spec.name,
        kind=kind,
        mode="oneshot",
        max_batch=spec.max_batch,
        max_num_seqs=spec.max_num_seqs,
        max_input_tokens=padded.input_max,
        vocab_size=loaded.vocab_size,
        prior_ns=padded.prior_ns,
        facts=loaded.facts | padded.facts | facts,
        padded=True,
        truncate=spec.truncate == "cut",
        experts=routing.card if routing is not None else None,
        **said,
    )
    return OneShot(whole, padded.run, tokens=padded.computed, routing=padded.routed if routing is not None else None)


def routing_of(spec: ModelSpec, loaded: Loaded) -> Telemetry | None:
    """What counts the load of the model's experts; None of a model without. Raises LoadError."""
    return watch(loaded.model, loaded.device, **placement_of(spec))


def input_limit(loaded: Loaded, asked: int = 0, trained: int = 0) -> int:
    """Longest input in tokens: as asked for, else as the model was trained for, never more than it has positions."""
    positions = _positions(loaded) or INPUT_IDS_MAX
    return min(asked or trained or positions, positions)


def _positions(loaded: Loaded) -> int:
    """Tokens the model has positions for. Those that count positions from behind the padding id have fewer."""
    limit = int(getattr(loaded.model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    embeddings = getattr(loaded.model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if limit and padding is not None:
        limit -= int(padding) + 1
    return min(limit, loaded.context_tokens) if limit and loaded.context_tokens else limit or loaded.context_tokens


def _unlike_ends(texts: Sequence[Text]) -> int:
    """A padding id for a model that has none: one that no text ends with, so that each text's end can be seen."""
    ends = {text.ids[-1] for text in texts}
    return next(token for token in range(len(ends) + 1) if token not in ends)


def _mask(lengths: Any, width: int) -> Any:
    """[rows, width], True for tokens."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _mask_of(texts: Sequence[Text]) -> Any:
    """The same for `texts` side by side, on the CPU."""
    lengths = [len(text.ids) for text in texts]
    return _mask(torch.tensor(lengths), max(lengths))
