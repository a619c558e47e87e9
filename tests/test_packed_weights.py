"""Packed weights answer as the plain ones did, give their memory back, and can be taken back where they do not."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.workers.generate import weights  # noqa: E402
from headway.workers.generate.engine import GenerateEngine  # noqa: E402
from headway.workers.generate.weights import PackedWeights  # noqa: E402
from tests import torch_models as tiny  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # just large enough to be packed


def wide(**changes: Any) -> Any:
    return tiny.model("llama", **WIDE, **changes)


def make_engine(made: Any) -> GenerateEngine:
    return GenerateEngine(ModelSpec(page_tokens=8, step_tokens=40, max_num_seqs=6, kv_mib=8), tiny.loaded(made))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_plain_model_at_any_number_of_rows(tied: bool) -> None:
    made = wide(tie_word_embeddings=tied)
    ids = torch.tensor([[random.Random(3).randrange(tiny.VOCAB) for _ in range(37)]])
    rows = (1, 2, 7, 16, 37)
    with torch.inference_mode():
        plain = [made(ids[:, :count], use_cache=False).logits for count in rows]
        packed = PackedWeights(made)
        assert packed.bytes > made.get_input_embeddings().weight.numel() * 4
        for count, before in zip(rows, plain, strict=True):
            after = made(ids[:, :count], use_cache=False).logits
            assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())
        packed.restore()
        assert torch.equal(made(ids, use_cache=False).logits, plain[-1])
        assert packed.bytes == 0


@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_the_same_rows_are_one_product_and_each_may_still_be_called_alone(biased: bool) -> None:
    made = wide(attention_bias=biased, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    generator = torch.Generator().manual_seed(4)
    for layer in made.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            bias = getattr(layer.self_attn, name).bias
            if bias is not None:
                bias.data.normal_(generator=generator)
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        plain = made(ids, use_cache=False).logits
        packed = PackedWeights(made)
        made(ids[:, :3], use_cache=False)
        assert packed.join() == len(made.model.layers) * 5  # queries, keys, values; gate, up
        mlp = made.model.layers[0].mlp
        for _ in range(2):
            assert float((made(ids, use_cache=False).logits - plain).abs().max()) <= 1e-4 * float(plain.abs().max())
        rows = torch.randn(1, 5, made.config.hidden_size, generator=generator)
        both = [mlp.gate_proj(rows), mlp.up_proj(rows)]
        assert torch.equal(mlp.up_proj(rows), both[1])  # without the other, twice, of other rows
        assert torch.equal(mlp.up_proj(rows), both[1])
        assert torch.allclose(mlp.up_proj(rows[:, :2]), both[1][:, :2], atol=1e-5)
        assert torch.equal(mlp.gate_proj(rows), both[0])
        packed.restore()
        assert torch.equal(made(ids, use_cache=False).logits, plain)


def test_layers_that_do_not_always_see_the_same_rows_stay_apart() -> None:
    layers, rows = [object() for _ in range(5)], [object() for _ in range(4)]
    calls = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (0, 3), (1, 3), (3, 2)]
    together = weights._together([(layers[layer], rows[at]) for layer, at in calls])
    assert together == [[layers[0], layers[1]]]
    assert weights._together([(layers[0], rows[0]), (layers[0], rows[0])]) == []


def test_code_that_writes_into_a_result_in_place_is_found_out_and_each_layer_stays_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = wide()
    mlp = made.model.layers[1].mlp

    def careless(hidden: Any) -> Any:
        gate = mlp.act_fn(mlp.gate_proj(hidden))
        hidden.mul_(0.5)  # between two layers that are given the same tensor
        return mlp.down_proj(gate * mlp.up_proj(hidden))

    mlp.forward = careless
    with caplog.at_level("INFO", "headway.worker"):
        subject = make_engine(made)
    assert "each layer is computed by itself" in caplog.text
    assert "packed by oneDNN" in subject.card.facts["linear_layers"]


def test_the_memory_of_plain_weights_is_given_back_but_not_that_of_a_tied_embedding() -> None:
    made = wide(tie_word_embeddings=True)
    PackedWeights(made).release()
    assert all(layer.mlp.up_proj.weight.untyped_storage().nbytes() == 4 for layer in made.model.layers)
    assert made.model.layers[0].mlp.up_proj.weight.isnan().all()
    assert torch.isfinite(made.get_input_embeddings().weight).all()


def test_an_engine_with_packed_weights_gives_the_solo_tokens() -> None:
    made, alone = wide(), wide()
    wanted = tiny.requests(6)
    subject = make_engine(made)
    assert "packed by oneDNN" in subject.card.facts["linear_layers"]
    answers = tiny.drive(subject, wanted)
    for rid, (ids, params) in enumerate(wanted):
        tokens = list(ids)
        with torch.inference_mode():
            for _ in range(params.max_new_tokens):
                tokens.append(int(alone(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert answers.tokens[rid] == tokens[len(ids) :]


def test_a_model_that_reads_a_weight_past_its_layer_keeps_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    made = wide()
    mlp = made.model.layers[1].mlp

    def by_hand(hidden: Any) -> Any:
        up = torch.nn.functional.linear(hidden, mlp.up_proj.weight)
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * up)

    mlp.forward = by_hand
    subject = make_engine(made)
    assert "linear_layers" not in subject.card.facts
    assert "weights stay as they came" in caplog.text
    assert torch.isfinite(mlp.up_proj.weight).all()
    wanted = tiny.requests(3)
    assert len(tiny.drive(subject, wanted).rows) == 3


def test_wrong_kernels_are_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = weights._forward

    def wrong(layer: Any) -> Any:
        product = right(layer)
        return lambda rows: product(rows) * 1.01

    monkeypatch.setattr(weights, "_forward", wrong)
    assert "linear_layers" not in make_engine(wide()).card.facts
    assert "its logits differ from its own" in caplog.text


def test_small_layers_and_other_kinds_stay() -> None:
    made = tiny.model("llama")  # all its layers are smaller than packing is worth
    assert PackedWeights(made).bytes == 0
    half = wide().to(torch.float16)
    assert PackedWeights(half).bytes == 0
