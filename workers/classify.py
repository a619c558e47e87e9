"""Class scores of a text, and the relevance of a pair: what a sequence classification head says.

`classify` gives a number for each label of the model's config. `score` is a cross-encoder with one label. What the
logits go through follows the libraries that trained the head, unless the operator says otherwise (`activation`):

- classify, as Transformers' text-classification pipeline: `problem_type` regression: nothing; multi-label, or one label
  only: sigmoid; else softmax.
- score, as sentence-transformers' CrossEncoder: what the config names (`sentence_transformers.activation_fn`, or
  `sbert_ce_default_activation_function`), else sigmoid.

Heads of decoders (Qwen3ForSequenceClassification and its like) read the last token that is not padding, and refuse to
batch if the config names no padding token. Then each rectangle is padded with an id that none of its texts ends with,
so that the answer is that of the text alone.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from headway.scheduler.link import Outcome
from headway.scheduler.spec import ModelSpec
from headway.workers.engine import Engine
from headway.workers.load import Loaded, LoadError, load_model, model_file
from headway.workers.padded import Padded, Rectangle, engine_of, input_limit, routing_of

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "none": lambda logits: logits,
}
_NAMED = {"Sigmoid": "sigmoid", "Identity": "none", "Tanh": "tanh"}  # classes of torch.nn, by their last name


def make_engine(spec: ModelSpec) -> Engine:
    """The classify or score engine for `spec`. Raises load.LoadError, which says what to do."""
    return classify_engine(spec, load_model(spec))


def classify_engine(spec: ModelSpec, loaded: Loaded) -> Engine:
    """An Engine around `loaded`, of the kind that `spec.engine` says: classify or score."""
    config = loaded.model.config
    text_config = config.get_text_config()
    pairs = spec.engine == "score"
    labels = _labels(loaded)
    if pairs and len(labels) != 1:
        raise LoadError(
            f"{loaded.source} has {len(labels)} labels; the score engine needs a head with one. "
            "Serve it with --engine classify"
        )
    chosen = spec.activation if spec.activation != "auto" else _default(config, pairs, loaded.source)
    activation = ACTIVATIONS[chosen]

    def forward(rectangle: Rectangle) -> Any:
        if getattr(text_config, "pad_token_id", None) != rectangle.pad:  # it has none, or none that exists
            text_config.pad_token_id = config.pad_token_id = rectangle.pad
        logits = loaded.model(**rectangle.inputs).logits.float()
        return activation(logits.view(-1, len(labels)))

    names = ["score"] if pairs else labels

    def answer(rid: int, row: Any) -> Outcome:
        return Outcome(rid, scores=dict(zip(names, row.tolist(), strict=True)))

    input_max = input_limit(loaded, spec.max_input_tokens)
    types = pairs and _pair_types(loaded)
    padded = Padded(loaded, forward, answer, input_max, types=types, routing=routing_of(spec, loaded))
    facts = {"activation": chosen} | ({} if pairs else {"labels": str(len(labels))})
    return engine_of(spec, spec.engine, loaded, padded, facts)


def _labels(loaded: Loaded) -> list[str]:
    """The names of the logits, in order."""
    names = loaded.model.config.id2label
    labels = [str(names[at]) for at in sorted(names)]
    if len(set(labels)) != len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise LoadError(f"{loaded.source} has two labels named {twice!r}; give each its own name in id2label")
    return labels


def _default(config: Any, pairs: bool, source: str) -> str:
    """A key of ACTIVATIONS: what those who trained the head put after it."""
    if not pairs:
        if config.problem_type == "regression":
            return "none"
        return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"
    trained = getattr(config, "sentence_transformers", None) or {}
    named = trained.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if not named:
        return "sigmoid"
    module, _, last = str(named).rpartition(".")
    if last not in _NAMED or not module.startswith("torch.nn"):
        raise LoadError(
            f"{source} names {named} as its activation, which is not known here; choose one with --activation "
            f"({', '.join(ACTIVATIONS)})"
        )
    return _NAMED[last]


def _pair_types(loaded: Loaded) -> bool:
    """Whether the second text of a pair has token type 1: the model has types, and its tokenizer gives them."""
    if loaded.tokenizer is None or int(getattr(loaded.model.config, "type_vocab_size", 0) or 0) < 2:
        return False
    found = model_file(loaded.source, "tokenizer_config.json")
    inputs = json.loads(found.read_text()).get("model_input_names") if found else None
    if inputs and "token_type_ids" not in inputs:
        return False
    types = Tokenizer.from_str(loaded.tokenizer.data.decode()).encode("a", "b").type_ids
    if not set(types) <= {0, 1} or types != sorted(types):
        raise LoadError(f"the tokenizer of {loaded.source} gives a pair the token types {types}; known is 0 … 0 1 … 1")
    return 1 in types
