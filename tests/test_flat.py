"""A model run as a list of operations answers as the model; one that cannot be written down so is left as it is."""

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.generate import flat, kernels  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

pytestmark = pytest.mark.skipif(
    bool(kernels.missing()) or not torch.backends.mkldnn.is_available(), reason=f"no kernels: {kernels.missing()}"
)

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # just large enough for packed weights, and so to be traced
JOINED = ("rms_norm", "rope", "silu_mul", "add_product", "attend")


def engine(made: Any, **spec: Any) -> GenerateEngine:
    settings = {"page_tokens": 8, "step_tokens": 40, "max_num_seqs": 6, "kv_mib": 8} | spec
    return GenerateEngine(ModelSpec(**settings), tiny.loaded(made))


def joined(subject: GenerateEngine) -> Counter[str]:
    """How often each kernel takes the place of operations."""
    made = subject._runner.flat
    assert made is not None
    names = [getattr(node.target, "__name__", "") for node in made.operations.graph.nodes]
    return Counter(name for name in names if name in JOINED)


def expect_like_plain(subject: GenerateEngine, build: Any) -> None:
    """The answers of `subject` are those of the model that `build` makes, run by a plain engine."""
    wanted = tiny.requests(7)
    plain = engine(build(), attention="eager")
    assert not plain._runner.traced
    assert tiny.drive(subject, wanted).tokens == tiny.drive(plain, wanted).tokens


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_traced_model_answers_as_the_model_with_its_small_operations_joined(name: str) -> None:
    build = lambda: tiny.model(name, **WIDE, head_dim=64)  # noqa: E731
    subject = engine(build())
    assert subject.card.facts["forward"] == "traced"
    found, layers = joined(subject), build().config.num_hidden_layers
    norms = 4 if name == "qwen3" else 2  # queries and keys have their own there
    assert found == {
        "rms_norm": norms * layers + 1,
        "silu_mul": layers,
        "add_product": 2 * layers,
        "attend": layers,
    }
    assert all(
        len(node.args) == 8 for node in subject._runner.flat.operations.graph.nodes if node.target is flat.attend
    )
    expect_like_plain(subject, build)


def test_positions_of_a_part_of_each_head_are_rotated_before_attention() -> None:
    def build() -> Any:
        torch.manual_seed(3)
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.VOCAB}
        return transformers.StableLmForCausalLM(transformers.StableLmConfig(**WIDE, **shape)).eval()

    subject = engine(build())
    assert joined(subject)["rope"] == 4
    expect_like_plain(subject, build)


def test_what_is_not_recognised_is_run_as_it_stands() -> None:
    build = lambda: tiny.model("gpt2", n_embd=256)  # noqa: E731
    subject = engine(build())
    assert subject.card.facts["forward"] == "traced"
    expect_like_plain(subject, build)


# ---------------------------------------------------------------- what is not traced


def test_a_model_that_goes_by_the_number_of_tokens_is_not_traced(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Any:
        made = tiny.model("llama", **WIDE)
        forward = made.model.norm.forward
        made.model.norm.forward = lambda states: forward(states) * (1.0 if states.shape[1] < 20 else 1.5)
        return made

    with caplog.at_level("INFO"):
        subject = engine(build())
    assert subject.card.facts["forward"] == "the model's own"
    assert "each operation is called by itself, which is slower: it goes by the number of tokens" in caplog.text
    expect_like_plain(subject, build)


def test_a_model_that_goes_by_what_it_sees_is_not_traced() -> None:
    def build() -> Any:
        made = tiny.model("llama", **WIDE)
        forward = made.model.norm.forward
        made.model.norm.forward = lambda states: forward(states) * (1.0 if float(states.max()) < 1e6 else 1.5)
        return made

    subject = engine(build())
    assert subject.card.facts["forward"] == "the model's own"
    expect_like_plain(subject, build)


def test_a_model_whose_layers_are_watched_is_not_traced() -> None:
    made = tiny.model("llama", **WIDE)
    seen = []
    made.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    subject = engine(made)
    assert subject.card.facts["forward"] == "the model's own"
    seen.clear()
    tiny.drive(subject, tiny.requests(1))
    assert seen


def without_window(*args: Any) -> Any:
    return flat.attend_right(*args[:-1], 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (kernels, "rope", lambda x, cos, sin: x * cos + x * sin),
        (kernels, "rms_norm", lambda x, weight, eps: x * weight + eps),
        (kernels, "silu_mul", lambda gate, up: gate * up),
        (flat, "add_product", lambda other, rows, weight, bias: other),  # noqa: ARG005
        (flat, "attend", without_window),
    ],
)
def test_a_wrong_operation_is_found_out_and_the_model_runs_itself(
    where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = lambda: tiny.model("mistral", **WIDE, sliding_window=100)  # noqa: E731
    monkeypatch.setattr(flat, "attend_right", flat.attend, raising=False)
    assert engine(build()).card.facts["forward"] == "traced"
    monkeypatch.setattr(where, name, wrong)
    subject = engine(build())
    assert subject.card.facts["forward"] == "the model's own"
    expect_like_plain(subject, build)


# ---------------------------------------------------------------- the kernels


@pytest.mark.parametrize("width", [1, 5, 16, 64, 100, 576])
def test_each_kernel_computes_what_the_operations_do(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    made = lambda *shape: torch.randn(*shape, generator=generator) * 3  # noqa: E731
    for tokens in (1, 3, 80):
        x, weight = made(1, tokens, width), made(width)
        expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-5)

        gate, up = made(1, tokens, 2 * width).split([width, width], -1)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(kernels.silu_mul(gate, up), expected, rtol=1e-5, atol=1e-5)

        turned = made(1, tokens, 3, 2 * width).transpose(1, 2)
        cos, sin = made(1, 1, tokens, 2 * width), made(1, 1, tokens, 2 * width)
        halves = torch.cat((-turned[..., width:], turned[..., :width]), -1)
        torch.testing.assert_close(kernels.rope(turned, cos, sin), turned * cos + halves * sin, rtol=1e-5, atol=1e-5)


def test_a_gate_of_any_size_gives_a_number_and_nan_stays() -> None:
    gate = torch.tensor([[[-1e30, -200.0, 0.0, 200.0, 1e30, float("nan")] * 4]])
    found = kernels.silu_mul(gate, torch.ones_like(gate))
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
