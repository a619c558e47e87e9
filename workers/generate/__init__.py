"""Iteration-level generation with unmodified Transformers models.

`pages` holds keys and values, `plan` lays out one step, `attention` keeps requests apart in it, `runner` runs it on a
model it has verified, `sampling` chooses tokens, `engine` decides who runs. Importing this package imports torch.
"""

from headway.scheduler.spec import ModelSpec
from headway.workers.engine import Engine
from headway.workers.generate.engine import GenerateEngine
from headway.workers.load import load_model

__all__ = ["GenerateEngine", "make_engine"]


def make_engine(spec: ModelSpec) -> Engine:
    """The generate engine for `spec`. Raises load.LoadError, which says what to do."""
    return GenerateEngine(spec, load_model(spec, "generate"))
