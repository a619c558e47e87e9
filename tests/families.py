"""Decoder families as Transformers has them, each tiny and random: what engines are tried on, and what the table of
docs/engines.md lists. A family is its class in Transformers and how its configuration differs from a plain small one.
"""

from typing import Any, NamedTuple

import torch
import transformers

VOCAB = 256
PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 7}  # shorter than the texts, longer than a narrowed probe
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
HEADS = {"head_dim": 8}
SCALED = {"query_pre_attn_scalar": 24}


class Family(NamedTuple):
    """`made`: the class of the model; `changes`: to PLAIN; keys that its configuration does not have are left out."""

    made: str
    changes: dict[str, Any]


FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM", {}),
    "Mistral": Family("MistralForCausalLM", WINDOW),
    "Ministral": Family("Ministral3ForCausalLM", HEADS),
    "Qwen2": Family("Qwen2ForCausalLM", {}),
    "Qwen2, sliding windows": Family("Qwen2ForCausalLM", WINDOW | ALTERNATING | {"use_sliding_window": True}),
    "Qwen3": Family("Qwen3ForCausalLM", HEADS),
    "Gemma": Family("GemmaForCausalLM", HEADS),
    "Gemma 2": Family("Gemma2ForCausalLM", HEADS | WINDOW | ALTERNATING | SCALED | {"attn_logit_softcapping": 5.0}),
    "Gemma 3": Family("Gemma3ForCausalLM", HEADS | WINDOW | ALTERNATING | SCALED),
    "Gemma 4": Family(
        "Gemma4ForCausalLM",
        HEADS
        | WINDOW
        | ALTERNATING
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    ),
    "Phi": Family("PhiForCausalLM", {"num_key_value_heads": 4}),
    "Phi-3": Family("Phi3ForCausalLM", WINDOW),
    "GPT-2": Family("GPT2LMHeadModel", GPT2),
    "GPT-J": Family("GPTJForCausalLM", GPT2 | {"rotary_dim": 4}),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", {}),
    "GPT-BigCode": Family("GPTBigCodeForCausalLM", GPT2),
    "CodeGen": Family("CodeGenForCausalLM", GPT2 | {"rotary_dim": 4}),
    "OPT": Family("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "StarCoder2": Family("Starcoder2ForCausalLM", WINDOW),
    "StableLM": Family("StableLmForCausalLM", {}),
    "Nemotron": Family("NemotronForCausalLM", {}),
    "Granite": Family("GraniteForCausalLM", {"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "Cohere": Family("CohereForCausalLM", {}),
    "Cohere 2": Family("Cohere2ForCausalLM", WINDOW | ALTERNATING),
    "OLMo 2": Family("Olmo2ForCausalLM", {}),
    "OLMo 3": Family("Olmo3ForCausalLM", WINDOW | ALTERNATING),
    "GLM-4": Family("Glm4ForCausalLM", HEADS),
    "EXAONE 4": Family("Exaone4ForCausalLM", WINDOW | ALTERNATING),
    "SmolLM3": Family("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "Arcee": Family("ArceeForCausalLM", {}),
    "Apertus": Family("ApertusForCausalLM", {}),
    "BitNet": Family("BitNetForCausalLM", {}),
    "ERNIE 4.5": Family("Ernie4_5ForCausalLM", HEADS),
    "Helium": Family("HeliumForCausalLM", HEADS),
    "Hunyuan": Family("HunYuanDenseV1ForCausalLM", HEADS),
    "NanoChat": Family("NanoChatForCausalLM", {}),
    "Persimmon": Family("PersimmonForCausalLM", {}),
    "Seed-OSS": Family("SeedOssForCausalLM", HEADS),
    "BioGPT": Family("BioGptForCausalLM", {}),
    "CWM": Family("CwmForCausalLM", HEADS | WINDOW | ALTERNATING | {"bos_token_id": 1, "eos_token_id": 2}),
    "DiffLlama": Family("DiffLlamaForCausalLM", {}),
    "Phi-3.5-MoE": Family("PhimoeForCausalLM", EXPERTS),
    "Mixtral": Family("MixtralForCausalLM", EXPERTS),
    "OLMoE": Family("OlmoeForCausalLM", EXPERTS),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", EXPERTS | HEADS),
    "GPT-OSS": Family("GptOssForCausalLM", EXPERTS | HEADS | WINDOW),
    "Granite MoE": Family("GraniteMoeForCausalLM", EXPERTS),
    "DeepSeek-V2": Family("DeepseekV2ForCausalLM", EXPERTS | LATENT),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", EXPERTS | LATENT),
    "GLM-4 MoE Lite": Family("Glm4MoeLiteForCausalLM", EXPERTS | LATENT),
    "MiniCPM3": Family("MiniCPM3ForCausalLM", LATENT),
    "MiniMax-M2": Family("MiniMaxM2ForCausalLM", EXPERTS | HEADS),
    "MiMo-V2-Flash": Family("MiMoV2FlashForCausalLM", EXPERTS | HEADS | WINDOW | ALTERNATING),
    "ERNIE 4.5 MoE": Family("Ernie4_5_MoeForCausalLM", EXPERTS | HEADS),
    "Hunyuan MoE": Family("HunYuanMoEV1ForCausalLM", EXPERTS | HEADS),
    "FlexOlmo": Family("FlexOlmoForCausalLM", EXPERTS),
    "AFMoE": Family("AfmoeForCausalLM", EXPERTS | HEADS | WINDOW | ALTERNATING),
    "JetMoE": Family("JetMoeForCausalLM", EXPERTS | {"kv_channels": 8}),
    "GLM-4 MoE": Family("Glm4MoeForCausalLM", EXPERTS | HEADS | {"n_routed_experts": 4, "first_k_dense_replace": 1}),
}


def config_of(family: Family) -> Any:
    """Its configuration: PLAIN with its changes, and only such keys as it knows."""
    kind = getattr(transformers, family.made).config_class
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} | set(kind.attribute_map)
    return kind(**{key: value for key, value in (PLAIN | family.changes).items() if key in known})


def model(name: str) -> Any:
    """A new model of the family of that name, the same one each time."""
    return build(FAMILIES[name])


def build(family: Family) -> Any:
    """A new model of `family`, the same one each time."""
    torch.set_num_threads(1)
    torch.manual_seed(len(family.made))
    made = getattr(transformers, family.made)(config_of(family)).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)  # for varied answers
    return made
