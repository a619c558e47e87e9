"""Ways to run a model with a cache of its own: what is kept of each request, and how requests meet in one forward.

For models that pages cannot hold: recurrent states, ALiBi, attention outside of Transformers' interface. Correctness
comes first, so there are three ways, and `trial` takes the first that answers as the model does alone:

- Together: a prompt is read alone, without padding, so that nothing can leak into a recurrent state. Answers grow in
  one batch: keys and values aligned at the right, zeros at the left that the mask hides, states stacked as they are.
- Apart: a cache for each request, a forward for each.
- Afresh: no cache, the whole text again for each token.

A token of the input is never padding, in none of them: whoever counts tokens (experts) counts requests' own.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import cache_utils

from headway.workers.generate.probe import CannotError
from headway.workers.load import Loaded

Key = tuple[int, int]
Text = tuple[Key, Sequence[int]]  # a request and all its tokens so far

CACHES = ("cache", "past_key_values", "cache_params", "state")  # what models call it, in their forward and their output


class Way(Protocol):
    """One way to run a model. Requests are known by key; state of one is never read for another.

    `name` says to people what it is; `whole`: prompts cannot be read in pieces; `forward`: the model's, which tells of
    each of its runs.
    """

    name: str
    whole: bool
    forward: "Forward"

    def read(self, key: Key, tokens: Sequence[int], start: int) -> Any:
        """Read tokens[start:] of a request alone, after what was read before: logits [vocabulary] after the last."""
        ...

    def decode(self, texts: Sequence[Text]) -> Any:
        """Read the last token of each of these, all of which have been read up to it: logits [rows, vocabulary]."""
        ...

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget these requests; unknown ones are ignored."""
        ...


class Forward:
    """The model's forward, with the names it has for things. Returns the logits after the last token, and its cache.

    After each run `ran` is called with what was in it, row after row: (request, first position, tokens).
    """

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model
        self._device = loaded.device
        parameters = inspect.signature(loaded.model.forward).parameters
        self._cache = next((name for name in CACHES if name in parameters), "")
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._positions = "position_ids" in parameters
        self.ran: Callable[[list[tuple[Key, int, int]]], None] = lambda _: None

    def __call__(self, ids: Sequence[Sequence[int]], cache: Any, **options: Any) -> tuple[Any, Any]:
        """`ids` [rows, tokens] of one length. Raises CannotError if the model returns no cache."""
        if not self._cache:
            raise CannotError("its class has no cache")
        given = {self._cache: cache} if cache is not None else {}
        out = self._model(self.tensor(ids), use_cache=True, **given, **self._last, **options)
        cache = getattr(out, self._cache, None)
        if cache is None:
            raise CannotError("its forward returns no cache")
        return out.logits[:, -1], cache

    def whole(self, tokens: Sequence[int]) -> Any:
        """Logits [1, vocabulary] after a whole text, without a cache."""
        return self._model(self.tensor([tokens]), use_cache=False, **self._last).logits[:, -1]

    def positions(self, values: Any) -> dict[str, Any]:
        """`values` [rows, tokens], given as `generate` gives them if the model takes them: some count wrongly alone."""
        return {"position_ids": values} if self._positions else {}

    def tensor(self, values: Sequence[Sequence[int]]) -> Any:
        return torch.tensor(values, device=self._device)


class Afresh:
    """No cache: quadratic in the length of a text, and right for every model."""

    name = "one by one, without a cache"
    whole = True

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __repr__(self) -> str:
        return "<Afresh>"

    def read(self, key: Key, tokens: Sequence[int], start: int) -> Any:  # noqa: ARG002
        logits = self.forward.whole(tokens)[0]
        self.forward.ran([(key, 0, len(tokens))])
        return logits

    def decode(self, texts: Sequence[Text]) -> Any:
        return torch.stack([self.read(key, tokens, 0) for key, tokens in texts])

    def drop(self, keys: Sequence[Key]) -> None:
        pass


class Apart:
    """A cache for each request, a forward for each."""

    name = "one by one"

    def __init__(self, forward: Forward, *, whole: bool = False) -> None:
        self.whole = whole
        self.forward = forward
        self._caches: dict[Key, Any] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, prompts {'whole' if self.whole else 'in pieces'}>"

    def read(self, key: Key, tokens: Sequence[int], start: int) -> Any:
        positions = self.forward.positions(self.forward.tensor([range(start, len(tokens))]))
        logits, self._caches[key] = self.forward([tokens[start:]], self._caches.get(key), **positions)
        self.forward.ran([(key, start, len(tokens) - start)])
        return logits[0]

    def decode(self, texts: Sequence[Text]) -> Any:
        return torch.stack([self.read(key, tokens, len(tokens) - 1) for key, tokens in texts])

    def drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._caches.pop(key, None)

    def bytes_of(self, key: Key) -> int:
        """What the cache of a request takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self._caches[key], set()))


class Together(Apart):
    """Prompts alone; answers as the rows of one batch."""

    name = "padded"

    def __init__(self, forward: Forward, *, whole: bool = False) -> None:
        super().__init__(forward, whole=whole)
        self._batch: Any = None
        self._members: dict[Key, int] = {}  # row by row: how many tokens were read

    def decode(self, texts: Sequence[Text]) -> Any:
        order = [key for key, _ in texts]
        assert self._members.keys() <= set(order), "a row of the batch is neither decoded nor dropped"
        for key, tokens in texts:
            if key not in self._members:
                self._join(key, len(tokens) - 1)
        last = {key: tokens[-1] for key, tokens in texts}
        logits, self._batch = self.forward([[last[key]] for key in self._members], self._batch, **self._placed())
        self.forward.ran([(key, read, 1) for key, read in self._members.items()])
        for key in self._members:
            self._members[key] += 1
        rows = {key: row for row, key in enumerate(self._members)}
        return logits[[rows[key] for key in order]]

    def drop(self, keys: Sequence[Key]) -> None:
        super().drop(keys)
        self._leave([key for key in keys if key in self._members])

    def _placed(self) -> dict[str, Any]:
        """Mask and positions of a step; a model without attention has no use for either."""
        if not any(isinstance(layer, cache_utils.DynamicLayer) for layer in self._batch.layers):
            return {}
        read = self.forward.tensor([[read] for read in self._members.values()])
        width = max(self._members.values()) + 1
        mask = torch.arange(width, device=read.device) >= width - 1 - read
        return {"attention_mask": mask.long()} | self.forward.positions(read)

    def _join(self, key: Key, read: int) -> None:
        cache = self._caches.pop(key)
        if self._batch is None:
            _check_layers(cache)
            self._batch = cache
        else:
            for own, new in zip(self._batch.layers, cache.layers, strict=True):
                _stack(own, new)
        self._members[key] = read

    def _leave(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        kept = [row for row, key in enumerate(self._members) if key not in set(keys)]
        for key in keys:
            del self._members[key]
        if not kept:
            self._batch = None
            return
        width = max(self._members.values())
        for layer in self._batch.layers:
            _keep(layer, kept, width)


# ---------------------------------------------------------------- layers of a cache

STACKED = {
    getattr(cache_utils, name, None)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
}


def _check_layers(cache: Any) -> None:
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ()) if type(layer) not in STACKED}
    if kinds or not getattr(cache, "layers", ()):
        raise CannotError(f"rows of its cache ({', '.join(sorted(kinds)) or type(cache).__name__}) cannot be stacked")


def _states(layer: Any) -> list[dict[int, Any]]:
    return [getattr(layer, name) for name in ("conv_states", "recurrent_states") if hasattr(layer, name)]


def _stack(own: Any, new: Any) -> None:
    """Add the row of layer `new` to those of `own`."""
    for states, added in zip(_states(own), _states(new), strict=True):
        for index, state in states.items():
            if state is not None:
                states[index] = torch.cat([state, added[index]])
    if getattr(own, "keys", None) is None:
        return
    width = max(own.keys.shape[-2], new.keys.shape[-2])
    own.keys = torch.cat([_padded(own.keys, width), _padded(new.keys, width)])
    own.values = torch.cat([_padded(own.values, width), _padded(new.values, width)])
    if hasattr(own, "cumulative_length"):
        own.cumulative_length = max(own.cumulative_length, new.cumulative_length)


def _keep(layer: Any, rows: list[int], width: int) -> None:
    """Only these rows stay, and of their texts the last `width` columns, or the window of the layer."""
    for states in _states(layer):
        for index, state in states.items():
            if state is not None:
                states[index] = state[rows]
    if getattr(layer, "keys", None) is None:
        return
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = width
        width = min(width, layer.sliding_window - 1)
    start = layer.keys.shape[-2] - width
    layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]


def _padded(states: Any, width: int) -> Any:
    return F.pad(states, (0, 0, width - states.shape[-2], 0))


def _tensors(thing: Any, seen: set[int]) -> list[Any]:
    """Every tensor a cache holds, whatever it is made of."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    parts = [*inside, *getattr(thing, "__dict__", {}).values()]
    return [tensor for part in parts for tensor in _tensors(part, seen)]
