"""From what the link brings to a Request: the one door of every engine that generates.

Whatever is wrong with an item is found here, before it costs anybody anything, and becomes its ending.
"""

import dataclasses
import random
from collections.abc import Callable

from headway.scheduler import link
from headway.scheduler.errors import HeadwayError
from headway.scheduler.link import Card, Item, Row
from headway.scheduler.params import check_vocabulary
from headway.scheduler.wire import Params
from headway.workers.generate.request import Request
from headway.workers.generate.sampling import choice_of
from headway.workers.load import Loaded


@dataclasses.dataclass(frozen=True, slots=True)
class Intake:
    """What items are held against. `eos`: ids that end a text; `context_tokens`: input and output (0: no bound);
    `no_room(tokens)`: why a text of so many can never be kept, or nothing; `rng` seeds who brings no seed.
    """

    vocab_size: int
    eos: frozenset[int]
    max_input_tokens: int
    context_tokens: int
    no_room: Callable[[int], str]
    rng: random.Random

    @classmethod
    def of(cls, loaded: Loaded, card: Card, no_room: Callable[[int], str], rng: random.Random) -> "Intake":
        """The door of an engine that serves `loaded` as `card` says."""
        return cls(
            vocab_size=loaded.vocab_size,
            eos=frozenset(token for token in loaded.eos if token < loaded.vocab_size),
            max_input_tokens=card.max_input_tokens,
            context_tokens=card.context_tokens,
            no_room=no_room,
            rng=rng,
        )

    def take(self, batch: int, item: Item) -> Request | Row:
        """The request, or the ending of one that cannot be run or came complete."""
        params = item.params or Params()
        try:
            tokens, done = link.unpack_ids(item.ids), link.unpack_ids(item.done)
        except ValueError:
            return _refused(batch, item, "invalid_request", "token ids are not whole 32-bit integers")
        if fault := self._fault(tokens, done, params):
            return _refused(batch, item, *fault)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        request = Request(
            batch=batch,
            rid=item.rid,
            tokens=tokens + done,
            input_tokens=len(tokens),
            limit=self._limit(tokens, params),
            choice=choice_of(params, self.rng.getrandbits(63), stops),
            stops=stops,
            tenant=item.tenant,
        )
        if request.ending:  # it came complete: all that was missing is this report
            return Row(batch, item.rid, [], request.ending)
        return request

    def _fault(self, tokens: list[int], done: list[int], params: Params) -> tuple[str, str] | None:
        """Why this request cannot be run (code and message), or None."""
        if not tokens:
            return "invalid_request", "the input is empty"
        if max(tokens) >= self.vocab_size or max(done, default=0) >= self.vocab_size:
            return "invalid_request", f"token id {max(tokens + done)} is outside the vocabulary of {self.vocab_size}"
        try:
            check_vocabulary(params, self.vocab_size)
        except HeadwayError as error:
            return error.code, str(error)
        if len(tokens) > self.max_input_tokens:
            return "too_long", f"the input has {len(tokens)} tokens; the limit is {self.max_input_tokens}"
        if words := self.no_room(self._limit(tokens, params) - 1):  # the last token is answered, never read
            return "too_long", words
        return None

    def _limit(self, tokens: list[int], params: Params) -> int:
        wanted = len(tokens) + params.max_new_tokens
        return min(wanted, self.context_tokens) if self.context_tokens else wanted


def _refused(batch: int, item: Item, code: str, message: str) -> Row:
    return Row(batch, item.rid, [], "error", code, message)
