"""The start-up probe finds out an attention that is wrong in one thing only, whatever the length at which it shows."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.overrides import TorchFunctionMode  # noqa: E402

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate import attention, kernels, paged, plan  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.probe import NARROW, narrowed  # noqa: E402
from headway.workers.generate.runner import NotPackableError, Runner  # noqa: E402
from headway.workers.load import Loaded, LoadError, load_model  # noqa: E402
from tests import families  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

Patch = Callable[[pytest.MonkeyPatch], None]


def start(model: Any, **spec: Any) -> GenerateEngine:
    loaded = tiny.loaded(model, context_tokens=128, vocab_size=families.VOCAB)
    return GenerateEngine(ModelSpec(kv_mib=4, **spec), loaded)


def family(name: str, **changes: Any) -> Any:
    known = families.FAMILIES[name]
    return families.build(known._replace(changes=known.changes | changes))


def asked(**changes: Any) -> Patch:
    """An attention that hears something else than the layer says: None leaves it out."""

    return heard(lambda features: features | {key: value for key, value in changes.items() if key in features})


def heard(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("packed_sdpa", "packed_paged"):
            right = getattr(attention, name)
            wrong = lambda *args, right=right, **features: right(*args, **change(features))  # noqa: E731
            monkeypatch.setattr(attention, name, wrong)

    return patch


window_plus_one = heard(lambda features: features | {"sliding_window": features["sliding_window"] + 1})


def the_first_ones_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads the slots of whoever is first in the step."""
    right = paged.Tables.__init__

    def wrong(self: paged.Tables, of: plan.Plan) -> None:
        right(self, of)
        self.spans[:, 2] = 0

    monkeypatch.setattr(paged.Tables, "__init__", wrong)


def everything_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask in a chunk that goes on: tokens see what comes after them."""
    monkeypatch.setattr(plan, "_additive", lambda seen, dtype: torch.zeros(seen.shape, dtype=dtype))


def one_slot_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter decode row sees its padding."""

    right = plan.Plan.row_mask
    monkeypatch.setattr(plan.Plan, "row_mask", lambda self, *about: torch.zeros_like(right(self, *about)))


def a_neighbours_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks read the slots of whoever is first in the step."""
    right = plan.Plan._add_chunks

    def wrong(self: plan.Plan, *args: Any) -> Any:
        chunks = right(self, *args)
        shift = chunks[0].key_start if chunks else 0
        return [chunk._replace(key_start=shift, key_end=shift + chunk.key_end - chunk.key_start) for chunk in chunks]

    monkeypatch.setattr(plan.Plan, "_add_chunks", wrong)


LONG, SHORT = {"sliding_window": 100}, {"sliding_window": 3}
MISTAKES: dict[str, tuple[str, dict[str, Any], Patch]] = {
    "a window longer than the probe is left out": ("Mistral", LONG, asked(sliding_window=None)),
    "a window shorter than the probe is left out": ("Mistral", SHORT, asked(sliding_window=None)),
    "a window one position too wide": ("Mistral", LONG, window_plus_one),
    "a short window one position too wide": ("Mistral", SHORT, window_plus_one),
    "a window where there is none": ("Mistral", {"sliding_window": None}, asked(sliding_window=4)),
    "soft-capped scores are not": ("Gemma 2", {}, asked(softcap=None)),
    "sinks are left out": ("GPT-OSS", {}, asked(s_aux=None)),
    "the scale is the usual one": ("Granite", {}, asked(scaling=None)),
    "a chunk sees what comes after": ("Llama", {}, everything_seen),
    "a row sees its padding": ("Llama", {}, one_slot_too_many),
    "a chunk reads another request": ("Llama", {}, a_neighbours_page),
    "the kernel reads another request": ("Llama", {}, the_first_ones_slots),
}
OF_RECTANGLES = ("a chunk sees what comes after", "a row sees its padding", "a chunk reads another request")
OF_PAGED = ("the kernel reads another request",)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_attention_is_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, patch = MISTAKES[mistake]
    if mistake in OF_PAGED and (missing := kernels.missing()):
        pytest.skip(f"no kernel: {missing}")
    form = "sdpa" if mistake in OF_RECTANGLES else "paged" if mistake in OF_PAGED else "auto"
    start(family(name, **changes), attention=form)  # without the mistake it is served
    patch(monkeypatch)
    with pytest.raises(NotPackableError, match=r"its logits differ from its own \(relative error"):
        start(family(name, **changes), attention=form)


def test_a_window_that_only_the_models_mask_knows_is_found_out() -> None:
    """Phimoe builds a sliding mask and says nothing of it to its attention."""
    with pytest.raises(NotPackableError, match=f"windows narrowed to {NARROW}"):
        start(family("Phi-3.5-MoE", sliding_window=100))


def test_a_feature_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    right = modeling_llama.LlamaAttention.forward

    def newer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **kwargs | {"temperature_by_head": torch.ones(4)})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", newer)
    with pytest.raises(NotPackableError, match="asks for temperature_by_head"):
        start(families.model("Llama"))


def test_a_refused_model_is_as_it_was() -> None:
    model = family("Phi-3.5-MoE", sliding_window=100)
    ids = torch.arange(1, 60)[None]
    before = model(ids).logits
    with pytest.raises(NotPackableError):
        start(model)
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_windows_are_put_back() -> None:
    model = families.model("Gemma 3")
    with contextlib.suppress(ZeroDivisionError), narrowed(model) as found:
        assert {(name, was) for _, name, was in found} == {("sliding_window", 7)}
        assert model.config.sliding_window == NARROW
        raise ZeroDivisionError
    assert model.config.sliding_window == 7
    assert model.model.layers[0].self_attn.sliding_window == 7


# ---------------------------------------------------------------- half precision

ROUTED = ["Qwen3-MoE", "OLMoE", "Mixtral", "DeepSeek-V3", "GPT-OSS"]


def half(name: str, folder: Path) -> Loaded:
    """A family as it is served in bfloat16: saved, and loaded by the loader."""
    families.model(name).save_pretrained(folder)
    return load_model(ModelSpec(name="half", engine="generate", model=str(folder), device="cpu", dtype="bfloat16"))


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", *ROUTED])
def test_half_precision_passes_and_a_wrong_mask_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runner(half(name, tmp_path))
    everything_seen(monkeypatch)
    with pytest.raises(NotPackableError, match="cosine"):
        Runner(half(name, tmp_path))


def test_a_router_that_lost_its_precision_is_refused(tmp_path: Path) -> None:
    loaded = half("DeepSeek-V3", tmp_path)
    assert loaded.model.model.layers[1].mlp.gate.weight.dtype == torch.float32
    loaded.model.to(torch.bfloat16)
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.gate\.\S+ is torch.bfloat16; its class wants it in float32"):
        Runner(loaded)


class Scores(TorchFunctionMode):
    """Notes the precision in which scores of experts are made: softmax or sigmoid over 4 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, Any]] = set()

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in ("softmax", "sigmoid") and made.ndim == 2 and made.shape[-1] == families.EXPERTS["num_experts"]:
            self.seen.add((name, made.dtype))
        return made


@pytest.mark.parametrize("name", ROUTED)
def test_routers_score_in_the_precision_of_the_models_own_code(name: str, tmp_path: Path) -> None:
    loaded = half(name, tmp_path)
    with torch.inference_mode(), Scores() as own:
        loaded.model(torch.tensor([[1, 2, 3]]))
    subject = GenerateEngine(ModelSpec(kv_mib=4), loaded)
    with Scores() as packed:
        tiny.drive(subject, [([1, 2, 3], Params(max_new_tokens=3))])
    assert packed.seen == own.seen
    if name != "GPT-OSS":  # its softmax is over the chosen two, in the dtype of the weights
        assert {dtype for _, dtype in own.seen} == {torch.float32}


def test_a_step_runs_in_eval_and_inference_mode() -> None:
    model = families.model("Llama")
    subject, seen = start(model), []
    model.register_forward_hook(lambda module, *_: seen.append((module.training, torch.is_inference_mode_enabled())))
    tiny.drive(subject, [([1, 2, 3], Params(max_new_tokens=3))])
    assert set(seen) == {(False, True)}
