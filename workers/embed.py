"""Sentence embeddings from an encoder, as sentence-transformers computes them.

How a batch is cut and padded is `padded.py`'s, what follows the encoder is read by `sentence.py`. Here they meet.
"""

from typing import Any

from headway.scheduler.link import Outcome
from headway.scheduler.spec import ModelSpec
from headway.workers.engine import Engine
from headway.workers.load import Loaded, load_model
from headway.workers.padded import Padded, Rectangle, engine_of, input_limit, routing_of
from headway.workers.sentence import head_of, prompts_of, tokenizer_of, trained_tokens


def make_engine(spec: ModelSpec) -> Engine:
    """The embed engine for `spec`. Raises load.LoadError, which says what to do."""
    return embed_engine(spec, load_model(spec, "embed"))


def embed_engine(spec: ModelSpec, loaded: Loaded) -> Engine:
    """An Engine around `loaded`: token ids in, one vector a text out. Raises load.LoadError."""
    source = loaded.source
    head = head_of(source, loaded.device)

    def forward(rectangle: Rectangle) -> Any:
        hidden = loaded.model(**rectangle.inputs).last_hidden_state
        return head(hidden.float(), rectangle.mask, rectangle.lengths)

    input_max = input_limit(loaded, spec.max_input_tokens, trained_tokens(source))
    padded = Padded(loaded, forward, _answer, input_max, routing=routing_of(spec, loaded))
    prompts = prompts_of(source)
    names = ", ".join(name or "(default)" for name in sorted(prompts))
    facts = {"pooling": head.words} | ({"prompts": names} if names else {})
    return engine_of(spec, "embed", loaded, padded, facts, prompts=prompts, tokenizer=tokenizer_of(loaded))


def _answer(rid: int, row: Any) -> Outcome:
    return Outcome(rid, embedding=row.numpy().astype("<f4").tobytes())
