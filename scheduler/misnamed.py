"""What a client may have meant by a field that does not exist here: the names that others have for it.

Users come from vLLM, TGI, llama.cpp, Transformers and the OpenAI API, and write from memory. An unknown field is always
refused; this only makes the refusal say what to write instead.
"""

import difflib
import re
from collections.abc import Sequence

NAME_CHARS_MAX = 64  # a longer one is no slip of the memory

SAME = {
    "max_new_tokens": (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_length",
        "n_predict",
        "num_predict",
    ),
    "min_tokens": ("min_new_tokens", "min_length"),
    "temperature": ("temp", "do_sample"),
    "top_p": ("nucleus", "top_probability"),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "seed": ("random_seed", "rng_seed"),
    "stop": ("stop_sequences", "stop_strings", "stop_words", "stopping"),
    "stop_token_ids": ("stop_ids", "eos_token_id", "eos_token_ids", "end_id"),
    "ignore_eos": ("ignore_eos_token",),
    "logprobs": ("top_logprobs", "num_logprobs", "top_n_tokens", "n_probs", "details"),
    "prompt": ("inputs", "query"),
    "messages": ("conversation", "chat", "history"),
    "input_ids": ("prompt_token_ids", "prompt_ids", "tokens_ids"),
    "params": ("parameters", "sampling_params", "options", "generation_config", "extra_body"),
    "stream": ("streaming", "stream_options"),
    "deadline_ms": ("timeout", "timeout_ms", "timeout_s", "deadline", "max_time"),
    "tenant": ("user", "adapter_id", "account"),
    "id": ("request_id", "uid", "uuid"),
    "model": ("model_name", "model_id", "engine"),
    "text": ("sentence", "sentences"),
    "text_pair": ("document", "passage"),
}
WORDS = {  # where a name alone would not help
    **dict.fromkeys(
        ("n", "best_of", "num_return_sequences", "num_completions"),
        "a request has one answer; send several, with different seeds, and they share batches",
    ),
    **dict.fromkeys(
        ("num_beams", "beam_width", "use_beam_search", "length_penalty", "early_stopping"),
        "there is no beam search here",
    ),
    **dict.fromkeys(
        ("echo", "return_full_text", "prompt_logprobs"), "the answer is the new tokens alone, without the prompt"
    ),
    "skip_special_tokens": "special tokens have no text; they are in token_ids",
    "input": "it is prompt, messages or input_ids to generate, and text to embed or classify",
    "guided_json": "there is no guided decoding here",
    "response_format": "there is no guided decoding here",
    "tools": "tools are not passed to the chat template; write them into a message",
}
_PLACES = {other: name for name, others in SAME.items() for other in others}


def advice(name: str, top: Sequence[str], params: Sequence[str], *, inside: bool) -> str:
    """The end of the sentence that refuses field `name` of a message, or (`inside`) of its params; it may be empty.

    `top`: the fields of messages. `params`: those of params.
    """
    if len(name) > NAME_CHARS_MAX:
        return ""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    if plain in WORDS:
        return f"; {WORDS[plain]}"
    beside = ", beside params" if inside else ""
    places = {field: f"{field}{beside}" for field in top} | {field: f"params.{field}" for field in params}
    known = _PLACES.get(plain, plain)
    if known not in places:
        near = difflib.get_close_matches(plain, [*places, *_PLACES], n=1, cutoff=0.75)
        if not near:
            return ""
        known = _PLACES.get(near[0], near[0])
    return f"; did you mean {places[known]}?"
