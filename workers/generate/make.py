"""The engine that generates for a spec: packed where the model stands it, padded or one by one where not."""

from headway.scheduler.spec import ModelSpec
from headway.workers.engine import Engine
from headway.workers.generate.engine import GenerateEngine
from headway.workers.generate.padded import PaddedEngine
from headway.workers.generate.runner import NotPackableError
from headway.workers.load import Loaded, load_model, unpackable
from headway.workers.packaged import LoadError


def make_engine(spec: ModelSpec) -> Engine:
    """The engine that generates for `spec`. Raises load.LoadError, which says what to do."""
    return engine_for(spec, load_model(spec, "generate"))


def engine_for(spec: ModelSpec, loaded: Loaded) -> Engine:
    """Packed where the model answers so as it does alone, else padded or one by one; as `spec.packing` says."""
    why = "packing: padded" if spec.packing == "padded" else unpackable(loaded.model.config)
    if not why:
        try:
            return GenerateEngine(spec, loaded)
        except NotPackableError as error:
            why = error.why
    if spec.packing == "packed":
        raise LoadError(f"{loaded.source} cannot be run packed: {why}; leave out packing: packed to run it padded")
    return PaddedEngine(spec, loaded, why)
