"""Padding is never a token, in no engine: pad ids, end ids, positions and lengths that have fooled others."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headway.scheduler.spec import ModelSpec  # noqa: E402
from headway.scheduler.wire import Params  # noqa: E402
from headway.workers.generate.make import engine_for  # noqa: E402
from tests import families  # noqa: E402
from tests import torch_models as tiny  # noqa: E402
from tests.test_families import WANTED  # noqa: E402

LENGTHS = [1, 3, 5, 9, 17, 33, 63, 64]
ENGINES = [("GPT-2", "packed"), ("Llama", "packed"), ("GPT-2", "padded"), ("Llama", "padded"), ("XGLM", "padded")]


def engine(model: Any, packing: str) -> Any:
    loaded = tiny.loaded(model, context_tokens=128, vocab_size=families.VOCAB)
    return engine_for(ModelSpec(packing=packing, kv_mib=4, max_num_seqs=8, step_tokens=300), loaded)


@pytest.mark.parametrize(("name", "packing"), [*ENGINES, ("GPT-Neo", "auto"), ("Falcon, ALiBi", "auto")])
def test_rows_of_eight_lengths_keep_their_positions(name: str, packing: str) -> None:
    """Learned positions, rotary ones and slopes: one by one, all at once, and in the other order."""
    prompts = [[(at * 31 + length) % 255 + 1 for at in range(length)] for length in LENGTHS]
    wanted = [(ids, Params(max_new_tokens=16)) for ids in prompts]
    subject = engine(families.model(name), packing)
    alone = [tiny.drive(subject, [one]).tokens[0] for one in wanted]
    for order in (1, -1):
        answers = tiny.drive(subject, wanted[::order])
        assert [answers.tokens[rid] for rid in range(8)] == alone[::order]
        assert max(step.running for step in answers.steps) == 8


@pytest.mark.parametrize(("name", "packing"), ENGINES)
@pytest.mark.parametrize("pad", [0, 7, None])
@pytest.mark.parametrize("eos", [None, 2])
def test_pad_and_end_tokens_are_not_needed_and_mean_nothing_in_a_prompt(
    name: str, packing: str, pad: int | None, eos: int | None
) -> None:
    """Pad id 0 is no special case, none at all is none either, and a prompt may hold it anywhere."""
    known = families.FAMILIES.get(name) or families.OTHERS[name]
    model = families.build(known._replace(changes=known.changes | {"pad_token_id": pad, "eos_token_id": eos}))
    prompts = [[0], [0, 5, 0, 0], [7, 7, 9, 2], *(ids for ids, _ in WANTED[:3])]
    expected = []
    with torch.inference_mode():
        for ids in prompts:
            tokens = list(ids)
            for _ in range(4):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            expected.append(tokens[len(ids) :])
    answers = tiny.drive(engine(model, packing), [(ids, Params(max_new_tokens=4)) for ids in prompts])
    assert [answers.tokens[rid] for rid in range(len(prompts))] == expected
    assert max(step.running for step in answers.steps) == len(prompts)


@pytest.mark.parametrize(("name", "packing"), [*ENGINES, ("Mistral", "packed"), ("Mistral", "padded")])
def test_a_later_text_that_begins_alike_inherits_nothing(name: str, packing: str) -> None:
    """Strictly one after the other, also after one that was cancelled in the middle; sliding windows too."""
    prefix = [index * 37 % 255 + 1 for index in range(70)]
    second = ([*prefix, 6, 7], Params(max_new_tokens=8))
    expected = tiny.drive(engine(families.model(name), packing), [second]).tokens[0]
    subject = engine(families.model(name), packing)
    for turn in range(4):
        subject.add(1, tiny.items([([*prefix, 3, turn], Params(max_new_tokens=8))]))
        for _ in range(turn):
            subject.step()
        if turn:
            subject.cancel(1, [0])
        tiny.drive(subject)
        assert tiny.drive(subject, [second]).tokens[0] == expected
