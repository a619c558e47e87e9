"""Whether a model that is run in another way still answers as it came: what every way of running must pass at start.

The reference is the model's own forward over whole texts, without a cache and alone. Lengths hide mistakes: a sliding
window of 4096 positions that is left out shows after 4096 tokens, in an answer. So the reference is computed a second
time with every window of the model narrowed to a few positions, and both must be met. Two texts run side by side, so
that a model which mixes neighbours is found out too.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headway.workers.load import Loaded
from headway.workers.oneshot import text_of
from headway.workers.packaged import LoadError

CUTS = ((0, 6, 11, 12), (0, 6, 7, 8))  # how the two texts are read, in three steps: prompts, chunk beside row, rows
NARROW = 5  # positions; shorter than the first piece of a text
WINDOWS = (  # by which name configurations and modules know how far a token looks, or at how many
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
    "keep_window_size",
    "index_topk",
)
EXACT_ERROR = 1e-3  # float32: of a token's largest logit; rounding stays 100x below, a wrong mask far above
HALF_LIKENESS = 0.95  # half precision: cosine of the logits; rounding in deep models reaches 0.99


class CannotError(RuntimeError):
    """The model cannot be run in this way, for the reason given in plain words."""


class DifferentError(CannotError):
    """The model answers otherwise than it does by itself."""


def reason(error: Exception) -> str:
    """Why a way of running failed; an error of foreign code is given with its type."""
    return str(error) if isinstance(error, CannotError) else text_of(error)


class Probe:
    """`texts` (ids), and what the model as it came computes for each: `expected[i]` [tokens, vocabulary], float32.

    `narrow`: with its windows narrowed. Raises LoadError if the model itself computes what is not finite.
    """

    def __init__(self, loaded: Loaded, *, narrow: bool = False) -> None:
        self.narrow = narrow
        self._model = loaded.model
        self._half = loaded.model.dtype != torch.float32
        limit = loaded.context_tokens or max(map(max, CUTS))
        self.texts = [
            [(index * 7919 + 3 * text + 1) % loaded.vocab_size for index in range(min(cuts[-1], limit))]
            for text, cuts in enumerate(CUTS)
        ]
        with self.applied(), torch.inference_mode():
            self.expected = [self._alone(ids, loaded) for ids in self.texts]

    def __repr__(self) -> str:
        return f"<Probe {[len(ids) for ids in self.texts]}{' narrow' if self.narrow else ''}>"

    def applied(self) -> contextlib.AbstractContextManager[object]:
        """Inside, the model is as it was when the reference was computed."""
        return narrowed(self._model) if self.narrow else contextlib.nullcontext()

    def pieces(self, step: int) -> dict[int, tuple[int, list[int]]]:
        """What is read in one of three steps: for each text where it goes on, and with which ids."""
        found = {
            text: (CUTS[text][step], ids[CUTS[text][step] : CUTS[text][step + 1]])
            for text, ids in enumerate(self.texts)
        }
        return {text: (start, ids) for text, (start, ids) in found.items() if ids}

    def compare(self, text: int, start: int, logits: Any) -> None:
        """`logits` [tokens, vocabulary] after tokens `start`, ... of text `text`: the reference or DifferentError."""
        self.same(logits, self.expected[text][start : start + len(logits)])

    def same(self, logits: Any, expected: Any) -> None:
        """Both [tokens, vocabulary], from this model by two ways that should agree. Raises DifferentError."""
        logits, expected = logits.float(), expected.float()
        if self._half:
            likeness = float(torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min())
            good, found = likeness >= HALF_LIKENESS, f"cosine {likeness:.3f}"
        else:
            error = float(((logits - expected).abs().amax(-1) / expected.abs().amax(-1).clamp_min(1e-6)).max())
            good, found = error <= EXACT_ERROR, f"relative error {error:.1e}"
        if not good:
            where = f", windows narrowed to {NARROW}" if self.narrow else ""
            raise DifferentError(f"computed so, its logits differ from its own ({found}{where})")

    def _alone(self, ids: list[int], loaded: Loaded) -> Any:
        logits = self._model(torch.tensor([ids], device=loaded.device), use_cache=False).logits[0].float()
        if not torch.isfinite(logits.amax(-1)).all():
            raise LoadError(f"{loaded.source} computes logits that are not finite on a plain probe; try another dtype")
        return logits


def probes(loaded: Loaded) -> list[Probe]:
    """The plain probe, and one with narrowed windows if the model has any. Computed before anything is changed."""
    with narrowed(loaded.model) as found:
        pass
    return [Probe(loaded), Probe(loaded, narrow=True)] if found else [Probe(loaded)]


@contextlib.contextmanager
def narrowed(model: Any) -> Iterator[list[tuple[Any, str, int]]]:
    """Every window the model or its configuration holds is NARROW inside; yields what was changed."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    configs.append(model.config.get_text_config(decoder=True))
    owners = {id(owner): owner for owner in [*model.modules(), *configs] if owner is not None}
    found = [
        (owner, name, value)
        for owner in owners.values()
        for name in WINDOWS
        if type(value := getattr(owner, name, None)) is int and value > NARROW
    ]
    try:
        for owner, name, _ in found:
            setattr(owner, name, NARROW)
        yield found
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


def check_kept(loaded: Loaded) -> None:
    """What the model's class keeps in float32 (routers above all) came in float32. Raises LoadError by name."""
    model = loaded.model
    kept: Sequence[str] = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        half = weight.dtype in (torch.float16, torch.bfloat16)
        if half and any(f".{part}." in f".{name}." for part in kept):
            raise LoadError(f"{loaded.source}: {name} is {weight.dtype}; its class wants it in float32")
