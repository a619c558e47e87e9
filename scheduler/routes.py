"""Which model serves a request, and whether the request fits it: everything that is checked before the core sees it.

Learned from the workers' registrations. Errors name the field and the limit.
"""

from msgspec import Struct

from headway.scheduler import link, wire
from headway.scheduler.errors import HeadwayError
from headway.scheduler.flight import Flight
from headway.scheduler.spec import ModelSpec
from headway.scheduler.text import Encoded, TextPlane

LOADING_RETRY_MS = 1000
DEFAULT_NEW_TOKENS = wire.Params().max_new_tokens


class Route(Struct, eq=False):
    """One served (model, kind): what its workers say of it, its tokenizer, how many of them are here."""

    card: link.Card
    codec: TextPlane | None
    workers: dict[int, link.Card]


class Routes:
    """All that is served."""

    def __init__(self, models: tuple[ModelSpec, ...]) -> None:
        self._configured = models
        self.routes: dict[tuple[str, str], Route] = {}
        self._only: dict[str, Route] = {}  # kind -> the one route that serves it, where there is one
        self.hopeless: dict[str, str] = {}  # model name -> why no worker will come

    def join(self, worker: int, card: link.Card) -> None:
        """A worker registered. The newest card counts."""
        key = (card.name, card.kind)
        route = self.routes.get(key)
        if route is None:
            codec = TextPlane(card.tokenizer) if card.tokenizer is not None else None
            route = self.routes[key] = Route(card, codec, {})
        elif route.card.tokenizer != card.tokenizer:
            route.codec = TextPlane(card.tokenizer) if card.tokenizer is not None else None
        self._only = {kind: here for (_, kind), here in self.routes.items() if len(self._serving(kind)) == 1}
        route.card = card
        route.workers[worker] = card
        self.hopeless.pop(card.name, None)

    def part(self, worker: int) -> None:
        """A worker is gone; its route stays, so that requests can wait for the next one."""
        for route in self.routes.values():
            route.workers.pop(worker, None)

    def key_of(self, worker: int) -> tuple[str, str] | None:
        """Model and kind that a worker serves; None for one that is gone."""
        return next((key for key, route in self.routes.items() if worker in route.workers), None)

    def find(self, model: str | None, kind: str) -> Route:
        """Where a request goes. Raises HeadwayError: unknown_model, or no_worker while a model loads."""
        if model is not None:
            route = self.routes.get((model, kind))
            if route is not None:
                return route
        else:
            only = self._only.get(kind)
            if only is not None:
                return only
            fitting = self._serving(kind)
            if fitting:
                names = ", ".join(route.card.name for route in fitting)
                raise HeadwayError("unknown_model", f"several models serve {kind}; name one of: {names}", field="model")
        raise self._missing(model, kind)

    def _serving(self, kind: str) -> list[Route]:
        return [route for (_, its_kind), route in self.routes.items() if its_kind == kind]

    def _missing(self, model: str | None, kind: str) -> HeadwayError:
        served = {(spec.name, spec.kind) for spec in self._configured} | set(self.routes)
        fits = [pair for pair in sorted(served) if pair[1] == kind and model in (None, pair[0])]
        if fits and fits[0][0] not in self.hopeless:
            text = f"model {fits[0][0]!r} is still loading"
            return HeadwayError("no_worker", text, field="model", retry_after_ms=LOADING_RETRY_MS)
        if fits:
            name = fits[0][0]
            return HeadwayError("no_worker", f"no worker serves {name!r}: {self.hopeless[name]}", field="model")
        listed = ", ".join(f"{name} ({what})" for name, what in sorted(served)) or "nothing"
        asked = f"model {model!r} does not serve {kind}" if model is not None else f"no model serves {kind}"
        return HeadwayError("unknown_model", f"{asked} here; served: {listed}", field="model")


# ---------------------------------------------------------------- does it fit


def text_limit_bytes(card: link.Card) -> int:
    """Longer text cannot fit the model, whatever it says, and is not tokenised."""
    return wire.TEXT_BYTES_PER_TOKEN_MAX * card.max_input_tokens


def check_text(text: str, field: str, card: link.Card) -> None:
    """Refuse by length what need not be tokenised to be refused."""
    limit = text_limit_bytes(card)
    if 4 * len(text) > limit and (size := len(text.encode())) > limit:
        raise HeadwayError(
            "too_long",
            f"{field} has {size} bytes; the limit is {limit} "
            f"({wire.TEXT_BYTES_PER_TOKEN_MAX} for each of the model's {card.max_input_tokens} input tokens)",
            field=field,
        )


def cut_to_fit(codec: TextPlane, text: str, pair: str | None, card: link.Card) -> Encoded:
    """The ids of a text, or of a pair, of which as much is left off as is too long for the model.

    Of an endless text only so much is tokenised as `check_text` would let pass; if even that fits, because it is mostly
    blanks, what would have followed is not known, and it is refused as too long.
    """
    most = text_limit_bytes(card)
    found = codec.encode_within(text[:most], None if pair is None else pair[:most], card.max_input_tokens)
    if not found.cut and max(len(text), len(pair or "")) > most:
        count = len(found.first) + len(found.second)
        field = "text" if len(text) > most else "text_pair"
        raise HeadwayError(
            "too_long", f"{field} cannot be cut: its first {most} characters have {count} tokens", field=field
        )
    return found


def accept(flight: Flight, ids: list[int], field: str, route: Route, pair: list[int] | None = None) -> None:
    """Take the input ids, and those of a second text, into the flight. Raises HeadwayError if they cannot be run."""
    card = route.card
    if pair:
        accept(flight, ids + pair, field, route)
        flight.ids, flight.ids_pair = link.pack_ids(ids), link.pack_ids(pair)
        return
    if not ids:
        raise HeadwayError("invalid_request", f"{field} is empty: it has no tokens", field=field)
    if len(ids) > card.max_input_tokens:
        text = f"the input has {len(ids)} tokens; the limit of model {card.name!r} is {card.max_input_tokens}"
        raise HeadwayError("too_long", text, field=field)
    if card.vocab_size and (largest := max(ids)) >= card.vocab_size:
        where = f"{field}[{ids.index(largest)}]"
        text = f"{where} is {largest}; the model's vocabulary has {card.vocab_size} tokens"
        raise HeadwayError("invalid_request", text, field=where)
    flight.ids = link.pack_ids(ids)
    flight.tokens = len(ids)


def fit_output(params: wire.Params, tokens: int, card: link.Card) -> int:
    """How many tokens may be generated: the default shrinks to what fits, a wish that does not fit is refused."""
    limits = [limit for limit in (card.context_tokens, card.kv_tokens) if limit]
    room = min(limits) - tokens if limits else params.max_new_tokens
    if room <= 0:
        text = f"the input has {tokens} tokens; the limit for input and output together is {min(limits)}"
        raise HeadwayError("too_long", text, field="prompt")
    if params.min_tokens > room:
        text = f"{tokens} input tokens and min_tokens {params.min_tokens} exceed the limit of {min(limits)}"
        raise HeadwayError("too_long", text, field="params.min_tokens")
    if params.max_new_tokens > room and params.max_new_tokens != DEFAULT_NEW_TOKENS:
        text = (
            f"{tokens} input tokens and max_new_tokens {params.max_new_tokens} exceed the limit of {min(limits)}; "
            f"ask for at most {room}"
        )
        raise HeadwayError("too_long", text, field="params.max_new_tokens")
    return min(params.max_new_tokens, room)
