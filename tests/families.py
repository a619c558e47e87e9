"""Decoder families as Transformers has them, each tiny and random: what engines are tried on, and what the table of
docs/engines.md lists. A family is its class in Transformers and how its configuration differs from a plain small one.
"""

from collections.abc import Sequence
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

STATES = {
    "state_size": 4,
    "ssm_state_size": 4,
    "mamba_d_state": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
STATES_2 = STATES | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

# Models that pages or a packed row cannot hold.
OTHERS: dict[str, Family] = {
    "BLOOM": Family("BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "MPT": Family("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "Falcon": Family("FalconForCausalLM", {}),
    "Falcon, ALiBi": Family("FalconForCausalLM", {"alibi": True}),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM",
        {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    ),
    "GPT-NeoX Japanese": Family("GPTNeoXJapaneseForCausalLM", {"intermediate_multiple_size": 2}),
    "XGLM": Family("XGLMForCausalLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "GPT": Family("OpenAIGPTLMHeadModel", GPT2),
    "Llama 4": Family("Llama4ForCausalLM", HEADS | EXPERTS | {"attention_chunk_size": 7, "intermediate_size_mlp": 48}),
    "Phi-3.5-MoE, sliding window": Family("PhimoeForCausalLM", EXPERTS | WINDOW),
    "Doge": Family("DogeForCausalLM", {"keep_window_size": 7}),
    "DeepSeek-V3.2": Family(
        "DeepseekV32ForCausalLM", EXPERTS | LATENT | {"index_topk": 5, "index_n_heads": 8, "index_head_dim": 16}
    ),
    "Mamba": Family("MambaForCausalLM", STATES),
    "Mamba 2": Family("Mamba2ForCausalLM", STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}),
    "Falcon Mamba": Family("FalconMambaForCausalLM", STATES),
    "RWKV": Family("RwkvForCausalLM", {"context_length": 128, "attention_hidden_size": 32}),
    "RecurrentGemma": Family(
        "RecurrentGemmaForCausalLM",
        HEADS | {"lru_width": 32, "attention_window_size": 7, "block_types": ["recurrent", "attention"]},
    ),
    "Jamba": Family(
        "JambaForCausalLM",
        STATES
        | EXPERTS
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
    ),
    "Bamba": Family("BambaForCausalLM", STATES_2 | {"attn_layer_indices": [1]}),
    "Zamba 2": Family(
        "Zamba2ForCausalLM",
        STATES
        | {
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "layer_types": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
        },
    ),
    "Falcon H1": Family("FalconH1ForCausalLM", STATES_2 | {"mamba_d_ssm": 64}),
    "Nemotron H": Family(
        "NemotronHForCausalLM",
        STATES
        | HEADS
        | {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "layers_block_type": ["mamba", "attention"],
            "hybrid_override_pattern": "M*",
        },
    ),
    "Granite 4 hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        STATES_2 | EXPERTS | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    ),
    "LFM2": Family("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "LFM2-MoE": Family(
        "Lfm2MoeForCausalLM", EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM", HEADS | EXPERTS | DELTA | LINEAR | {"shared_expert_intermediate_size": 16}
    ),
    "Qwen3.5": Family("Qwen3_5ForCausalLM", HEADS | DELTA | LINEAR),
    "MiniMax": Family("MiniMaxForCausalLM", HEADS | EXPERTS | LINEAR | {"block_size": 8}),
    "OLMo hybrid": Family("OlmoHybridForCausalLM", DELTA | LINEAR),
    "Kimi Linear": Family(
        "KimiLinearForCausalLM", EXPERTS | LATENT | LINEAR | {"linear_head_dim": 8, "linear_num_heads": 4}
    ),
}


def config_of(family: Family) -> Any:
    """Its configuration: PLAIN with its changes, and only such keys as it knows."""
    kind = getattr(transformers, family.made).config_class
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} | set(kind.attribute_map)
    return kind(**{key: value for key, value in (PLAIN | family.changes).items() if key in known})


def model(name: str) -> Any:
    """A new model of the family of that name, the same one each time."""
    return build((FAMILIES | OTHERS)[name])


def build(family: Family) -> Any:
    """A new model of `family`, the same one each time."""
    torch.set_num_threads(1)
    torch.manual_seed(len(family.made))
    made = getattr(transformers, family.made)(config_of(family)).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)  # for varied answers
    return made


def generate(made: Any, ids: Sequence[int], count: int) -> list[int]:
    """What `generate` of Transformers answers, greedily and alone."""
    prompt = torch.tensor([ids])
    out = made.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def row(name: str, facts: dict[str, str]) -> str:
    """The line of a family in the table of docs/engines.md, by what the card of its engine says."""
    how, _, why = facts["generation"].partition(", not packed: ")
    prompts = facts.get("prompts", "read in pieces").removeprefix("read ")
    return f"| {name} | `{(FAMILIES | OTHERS)[name].made}` | {how} | {prompts} | {why.partition(' (')[0]} |"
