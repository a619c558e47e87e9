"""A random-init mixture-of-experts model whose routing can be predicted, made in a second, without training.

Random weights route unpredictably: R2 is about 0, whatever predicts. So topics are planted: a token belongs to topic
`id mod TOPICS`, its embedding points in its topic's direction (with a little noise), and each expert's router row
points in one topic's direction. Documents are mostly of one topic. What follows is a plain Transformers model.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from headway.bench.experts.routings import Routings, routed
from headway.scheduler import clock
from headway.workers.routers import find_routers
from headway.workers.routing import Share, watch

log = logging.getLogger(__name__)

TOPICS = 8
VOCABULARY = 8192
STRENGTH, NOISE = 3.0, 0.12  # of an embedding along its topic, and around it
OWN_TOPIC = 0.75  # share of a document's tokens that are of its topic
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "use_cache": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            "intermediate_size": 320,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 5,
            "n_shared_experts": 1,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": 96,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 256,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_experts": 64,
            "num_experts_per_tok": 4,
        },
    ),
}


def planted_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of `family` (a key of FAMILIES), eval mode, float32, topics planted."""
    name, config = FAMILIES[family]
    made_from = getattr(transformers, f"{name}Config")(**COMMON | config | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(made_from).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, 0, 0.02)
        embedding = model.get_input_embeddings().weight
        tokens, hidden = embedding.shape
        directions = torch.linalg.qr(torch.randn(hidden, TOPICS))[0].T
        embedding.copy_(directions[torch.arange(tokens) % TOPICS] * STRENGTH + torch.randn(tokens, hidden) * NOISE)
        for router in routers(model):
            experts = router.weight.shape[0]
            rows = directions[torch.arange(experts) % TOPICS] * (0.6 + 0.4 * torch.rand(experts, 1))
            router.weight.copy_((rows + torch.randn(experts, hidden) * 0.01)[torch.randperm(experts)])
    return model


def routers(model: Any) -> list[Any]:
    """The router modules, in layer order."""
    found = find_routers(model)
    assert found is not None
    return list(found.modules)


def documents(count: int, *, seed: int, vocabulary: int = VOCABULARY) -> list[tuple[npt.NDArray[np.int64], int]]:
    """Token ids of 32 to 159 tokens, and the topic of each document."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        topic, length = int(rng.integers(TOPICS)), int(rng.integers(32, 160))
        common = rng.zipf(1.3, length) % (vocabulary // TOPICS) * TOPICS + topic
        ids = np.where(rng.random(length) < OWN_TOPIC, common, rng.integers(0, vocabulary, length))
        made.append((ids.astype(np.int64), topic))
    return made


def planted_routings(family: str, *, train: int = 350, test: int = 150, seed: int = 0, **changes: Any) -> Routings:
    """Route documents through a planted model. About 5 s of one core with the default counts."""
    model = planted_model(family, seed=seed, **changes)
    found: list[Any] = []
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers(model)]
    experts = int(routers(model)[0].weight.shape[0])
    requests = []
    for ids, topic in documents(train + test, seed=seed):
        found.clear()
        with torch.inference_mode():
            model.model(input_ids=torch.from_numpy(ids)[None])
        indices = torch.stack([one.reshape(len(ids), -1) for one in found], 1).numpy()
        requests.append(routed(ids, indices, experts, topic))
    for hook in hooks:
        hook.remove()
    return Routings(f"planted {family}", requests[:train], requests[train:], TOPICS)


def hook_share(rows: int = 16, steps: int = 40) -> float:
    """Share of a decode step's CPU time that counting and reporting its routing takes, on a mid-sized model."""
    model = planted_model("qwen3_moe", hidden_size=512, moe_intermediate_size=256, num_hidden_layers=12, head_dim=64)
    telemetry = watch(model, torch.device("cpu"), devices=TOPICS)
    assert telemetry is not None
    ids = torch.randint(0, VOCABULARY, (1, rows))
    keys = [(1, row) for row in range(rows)]
    forward = counting = 0
    with torch.inference_mode():
        for step in range(steps):
            started = clock.cpu_ns()
            model(ids, use_cache=False, logits_to_keep=1)
            ran = clock.cpu_ns()
            telemetry.count([Share(key, 10 + step, 1, 10) for key in keys])
            telemetry.take(keys)
            forward += ran - started
            counting += clock.cpu_ns() - ran
    return counting / (forward + counting)
