"""Sentence embeddings from an encoder, as sentence-transformers computes them.

On a CPU a core computes about the same number of padded tokens a second whatever the batch, so padding is the whole
cost: a batch is sorted by length and cut into small sub-batches, each padded to its own longest. On a GPU, where a
launch is the cost, they are large. Results go back in the order of the requests. What comes after the encoder (pooling,
normalisation) is read from the model's own `modules.json`; a model with a step that is not known here is refused.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from headway.scheduler import clock
from headway.scheduler.errors import HeadwayError
from headway.scheduler.link import Card, Item, Outcome, unpack_ids
from headway.scheduler.spec import ModelSpec
from headway.workers.engine import Engine
from headway.workers.load import Loaded, load_model, model_file
from headway.workers.oneshot import OneShot
from headway.workers.packaged import LoadError

log = logging.getLogger("headway.worker")

SUB_BATCH_CPU = 4  # measured with MiniLM on one core: fewer pads less, more only adds padding
SUB_BATCH_CUDA = 64
POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
WARM_TEXTS, WARM_TOKENS = 4, 32


def make_engine(spec: ModelSpec) -> Engine:
    """The embed engine for `spec`. Raises load.LoadError, which says what to do."""
    return embed_engine(spec, load_model(spec, "embed"))


def embed_engine(spec: ModelSpec, loaded: Loaded, sub_batch: int = 0) -> Engine:
    """An Engine around `loaded`. `sub_batch`: texts padded together; 0: what suits the device."""
    embedder = Embedder(loaded, sub_batch, spec.max_input_tokens)
    started = clock.now_ns()
    prior_ns = embedder.timed()
    log.info("warmed up in %.1f s: %r", (clock.now_ns() - started) / clock.NS_PER_S, embedder)
    card = Card(
        name=spec.name,
        kind="embed",
        mode="oneshot",
        max_batch=spec.max_batch,
        max_num_seqs=spec.max_num_seqs,
        max_input_tokens=embedder.input_max,
        vocab_size=loaded.vocab_size,
        prior_ns=prior_ns,
        tokenizer=loaded.tokenizer,
        facts=loaded.facts | {"pooling": embedder.pooling, "sub_batch": str(embedder.sub_batch)},
    )
    return OneShot(card, embedder.run, tokens=embedder.padded_tokens)


class Embedder:
    """Token ids in, vectors out. `input_max`: longest input in tokens. `pooling`: what is done, in words."""

    def __init__(self, loaded: Loaded, sub_batch: int = 0, input_max: int = 0) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._vocab_size = loaded.vocab_size
        self._pad = getattr(loaded.model.config, "pad_token_id", None) or 0
        self._pool, self._normalise = _pooling(loaded.source)
        self.sub_batch = sub_batch or (SUB_BATCH_CUDA if loaded.device.type == "cuda" else SUB_BATCH_CPU)
        positions = _positions(loaded)
        asked = input_max or _trained_tokens(loaded.source) or positions
        self.input_max = min(asked, positions) if positions else asked

    def __repr__(self) -> str:
        return f"<Embedder {type(self._model).__name__}, {self.pooling}, {self.sub_batch} at a time>"

    @property
    def pooling(self) -> str:
        return self._pool + (", normalised" if self._normalise else "")

    def run(self, items: Sequence[Item]) -> list[Outcome | BaseException]:
        """One outcome for each item, in order. A bad item is its own error and takes nobody along."""
        outcomes: list[Outcome | BaseException] = []
        good: list[tuple[int, list[int]]] = []
        for item in items:
            ids, fault = self._checked(item)
            if fault is None:
                good.append((len(outcomes), ids))
            outcomes.append(fault or Outcome(item.rid))
        for part in self._parts(good):
            vectors = self._embed([ids for _, ids in part])
            for (place, _), vector in zip(part, vectors, strict=True):
                outcomes[place] = _outcome(items[place].rid, vector)
        return outcomes

    def padded_tokens(self, items: Sequence[Item]) -> int:
        """Tokens that `run(items)` computes, padding included."""
        good = [(place, ids) for place, item in enumerate(items) for ids, fault in [self._checked(item)] if not fault]
        return sum(len(part) * len(part[-1][1]) for part in self._parts(good))

    def timed(self) -> tuple[float, float, float]:
        """A first guess of a batch's cost: fixed, per token, per request (ns)."""
        long = min(WARM_TOKENS, self.input_max or WARM_TOKENS)
        one, longer, many = (
            self._fastest_ns(texts, tokens) for texts, tokens in ((1, 2), (1, long), (WARM_TEXTS, long))
        )
        per_token = max(0.0, (longer - one) / max(1, long - 2))
        per_text = max(0.0, (many - longer) / (WARM_TEXTS - 1) - per_token * long)
        return max(0.0, one - 2 * per_token - per_text), per_token, per_text

    def _fastest_ns(self, texts: int, tokens: int) -> int:
        times = []
        for _ in range(3):
            started = clock.now_ns()
            self._embed([[1 % self._vocab_size] * tokens] * texts)
            times.append(clock.now_ns() - started)
        return min(times)

    def _checked(self, item: Item) -> tuple[list[int], HeadwayError | None]:
        try:
            ids = unpack_ids(item.ids)
        except ValueError:
            return [], HeadwayError("invalid_request", "token ids are not whole 32-bit integers")
        if not ids:
            return [], HeadwayError("invalid_request", "the input is empty")
        if max(ids) >= self._vocab_size:
            text = f"token id {max(ids)} is outside the vocabulary of {self._vocab_size}"
            return [], HeadwayError("invalid_request", text)
        if self.input_max and len(ids) > self.input_max:
            return [], HeadwayError("too_long", f"the input has {len(ids)} tokens; the limit is {self.input_max}")
        return ids, None

    def _parts(self, good: Sequence[tuple[int, list[int]]]) -> list[list[tuple[int, list[int]]]]:
        """`good` (place, ids) by length, in sub-batches; the last of each is its longest."""
        ranked = sorted(good, key=lambda one: (len(one[1]), one[0]))
        return [ranked[at : at + self.sub_batch] for at in range(0, len(ranked), self.sub_batch)]

    @torch.inference_mode()
    def _embed(self, texts: Sequence[list[int]]) -> Any:
        """Vectors [texts, width], float32, on the CPU."""
        width = max(map(len, texts))
        ids = torch.tensor([text + [self._pad] * (width - len(text)) for text in texts], device=self._device)
        lengths = torch.tensor([len(text) for text in texts], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]
        hidden = self._model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        vectors = _pooled(self._pool, hidden.float(), mask, lengths)
        if self._normalise:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu()


def _pooled(pool: str, hidden: Any, mask: Any, lengths: Any) -> Any:
    """One vector for each text, of `hidden` [texts, tokens, width]; padding never counts."""
    if pool == "cls":
        return hidden[:, 0]
    if pool == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    if pool == "max":
        return hidden.masked_fill(~mask[..., None], float("-inf")).amax(1)
    return hidden.masked_fill(~mask[..., None], 0.0).sum(1) / lengths[:, None]


def _outcome(rid: int, vector: Any) -> Outcome | BaseException:
    if not torch.isfinite(vector).all():
        return HeadwayError("engine_error", "the model computed a vector that is not finite")
    return Outcome(rid, embedding=vector.numpy().astype("<f4").tobytes())


def _positions(loaded: Loaded) -> int:
    """Tokens the model has positions for. Those that count positions from behind the padding id have fewer."""
    limit = int(getattr(loaded.model.config, "max_position_embeddings", 0) or 0)
    embeddings = getattr(loaded.model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if limit and padding is not None:
        limit -= int(padding) + 1
    return min(limit, loaded.context_tokens) if limit and loaded.context_tokens else limit or loaded.context_tokens


def _trained_tokens(source: str) -> int:
    """The longest input the model was made for, if it says so; sentence-transformers cuts there, here it is refused."""
    found = model_file(source, "sentence_bert_config.json")
    return int(json.loads(found.read_text()).get("max_seq_length") or 0) if found else 0


def _pooling(source: str) -> tuple[str, bool]:
    """How token vectors become one (a value of POOLINGS), and whether it is normalised."""
    found = model_file(source, "modules.json")
    if found is None:
        return "mean", True
    pool, normalise = "", False
    for module in json.loads(found.read_text()):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            pool = _mode_of(source, module["path"])
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise LoadError(f"{source} has a {kind} step after its encoder, which the embed engine does not know")
    if not pool:
        raise LoadError(
            f"{source} says in modules.json that it pools nothing; the embed engine needs one vector a text"
        )
    return pool, normalise


def _mode_of(source: str, folder: str) -> str:
    found = model_file(source, f"{folder}/config.json")
    if found is None:
        raise LoadError(f"{source} names {folder}/config.json, but it is not there")
    config = json.loads(found.read_text())
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(modes) == 1 and modes[0] in POOLINGS:
        return POOLINGS[modes[0]]
    raise LoadError(f"{source} pools by {' and '.join(modes) or 'nothing'}; known is one of {', '.join(POOLINGS)}")
