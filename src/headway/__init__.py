"""headway: an adaptive dynamic-batching scheduler for Hugging Face Transformers models.

Three ways in: a server (`headway serve`) that any client with ZeroMQ and msgpack can use, and `Client` or `SyncClient`
here; the scheduler inside your own program (`Scheduler`); and replays of recorded traffic. Importing this loads
neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from headway.scheduler.errors import CODES, HeadwayError

if TYPE_CHECKING:
    from headway.scheduler.client import Client
    from headway.scheduler.client_types import Classification, Delta, Embedding, Generation, Relevance, TokenLogprob
    from headway.scheduler.embedded import Scheduler
    from headway.scheduler.spec import Curve, ModelSpec, PolicySpec, ServerSpec
    from headway.scheduler.sync_client import SyncClient

__version__ = "0.1.0"

_HOMES = {
    "Classification": "client_types",
    "Client": "client",
    "Curve": "spec",
    "Delta": "client_types",
    "Embedding": "client_types",
    "Generation": "client_types",
    "ModelSpec": "spec",
    "PolicySpec": "spec",
    "Relevance": "client_types",
    "Scheduler": "embedded",
    "ServerSpec": "spec",
    "SyncClient": "sync_client",
    "TokenLogprob": "client_types",
}

__all__ = [
    "CODES",
    "Classification",
    "Client",
    "Curve",
    "Delta",
    "Embedding",
    "Generation",
    "HeadwayError",
    "ModelSpec",
    "PolicySpec",
    "Relevance",
    "Scheduler",
    "ServerSpec",
    "SyncClient",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for, so that a program that needs the client alone does not load the rest."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headway.scheduler.{home}"), name)
