"""What a machine without a GPU cannot tell: one command for one that has it, and JSON with the answers.

    python -m headway.bench.gpu_check                # a model of about a billion random weights, under 8 minutes
    python -m headway.bench.gpu_check --device cpu   # the same steps on a tiny one, so that the script itself is tested

Checked: that packed, paged decoding gives the tokens of a run alone (in float32 to the token; in half precision how
far), which attention kernels run, that the memory plan is what is taken, and tokens a second beside Transformers' own
continuous batching at 8, 64 and 256 running. Each part stands alone: one that fails says so in its place, and what time
does not allow is left out by name.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from headway.scheduler import clock, link
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params
from headway.workers import memory
from headway.workers.generate.engine import GenerateEngine
from headway.workers.load import Loaded, load_model

SEED = 7
SOLO_PROMPTS, SOLO_TOKENS = 8, 48
PLANNED_WITHIN = 0.1  # of what is taken
SIZES = {
    "large": {  # 1.1 billion weights
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 4096,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    },
}
LOADS = {"large": ((8, 64, 256), 128, 64), "small": ((4,), 12, 8)}  # running, input tokens, output tokens


class Check:
    """One run. `folder` holds the model that is measured."""

    def __init__(self, device: str, size: str, folder: Path, seconds: int) -> None:
        self.device = torch.device(device)
        self.size = size
        self.folder = folder
        self.found: dict[str, Any] = {}
        self._until_ns = clock.now_ns() + seconds * clock.NS_PER_S

    def run(self) -> dict[str, Any]:
        """All parts, in order of what is most worth knowing."""
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("machine", self.machine),
            ("float32_tokens", self.exact),
            ("kernels", self.kernels),
            ("served", self.served),
            ("transformers", self.transformers),
        ]
        for name, part in parts:
            if clock.now_ns() > self._until_ns:
                self.found[name] = "left out: no time"
                continue
            began_ns = clock.now_ns()
            print(f"{name} ...", file=sys.stderr)
            try:
                self.found[name] = part()
            except Exception as error:  # the other parts still say something
                self.found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            self.found.setdefault("took_s", {})[name] = round((clock.now_ns() - began_ns) / clock.NS_PER_S, 1)
            gc.collect()
        return self.found

    @property
    def cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    # ------------------------------------------------------------ parts

    def machine(self) -> dict[str, Any]:
        """Versions, and what the device is."""
        facts: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
        if self.cuda:
            facts["device"] = torch.cuda.get_device_name(self.device)
            facts["capability"] = list(torch.cuda.get_device_capability(self.device))
            facts["memory"] = memory.size(torch.cuda.get_device_properties(self.device).total_memory)
        return facts

    def exact(self) -> dict[str, Any]:
        """A small model in float32: packed tokens are those of a run alone, all of them."""
        torch.backends.cuda.matmul.allow_tf32 = False
        folder = self.folder / "exact"
        made("small", torch.float32, self.device).save_pretrained(folder)
        loaded = load_model(self.spec(folder, dtype="float32"))
        prompts = prompts_of(SOLO_PROMPTS, 40, loaded.vocab_size)
        alone = [solo(loaded, prompt, 24) for prompt in prompts]
        engine = GenerateEngine(self.spec(folder, dtype="float32", step_tokens=32), loaded)
        packed = [tokens for _, tokens in sorted(drive(engine, prompts, 24).items())]
        same = sum(one == other for one, other in zip(alone, packed, strict=True))
        return {
            "same": same,
            "of": len(prompts),
            "ok": same == len(prompts),
            "attention": engine.card.facts["attention"],
        }

    def kernels(self) -> dict[str, Any]:
        """Which attention kernels can run on this device in its half precision."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        dtype = torch.bfloat16 if self.cuda else torch.float32
        query = torch.randn(1, 8, 64, 64, device=self.device, dtype=dtype)
        works: dict[str, Any] = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            try:
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
                works[backend.name.lower()] = True
            except RuntimeError as error:
                works[backend.name.lower()] = str(error).splitlines()[0][:120]
        try:
            import flash_attn

            works["flash_attn"] = flash_attn.__version__
        except ImportError:
            works["flash_attn"] = "not installed"
        return works

    def served(self) -> dict[str, Any]:
        """The large model as it is served: the plan against what is taken, tokens, and tokens a second."""
        folder = self.folder / "model"
        made(self.size, torch.bfloat16 if self.cuda else torch.float32, self.device).save_pretrained(folder)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        before = self.taken()
        running, inputs, outputs = LOADS[self.size]
        spec = self.spec(folder, max_num_seqs=max(running), max_batch=max(running), kv_mib=8192 if self.cuda else 16)
        loaded = load_model(spec)
        prompts = prompts_of(SOLO_PROMPTS, inputs, loaded.vocab_size)
        alone = [solo(loaded, prompt, min(SOLO_TOKENS, outputs)) for prompt in prompts]
        engine = GenerateEngine(spec, loaded)
        facts = {name: engine.card.facts[name] for name in ("attention", "dtype", "memory", "kv_dtype", "weights")}
        packed = [tokens for _, tokens in sorted(drive(engine, prompts, min(SOLO_TOKENS, outputs)).items())]
        found: dict[str, Any] = {"facts": facts, "tokens": agreement(alone, packed), "tokens_per_s": {}}
        for count in running:
            load = prompts_of(count, inputs, loaded.vocab_size)
            drive(engine, load, 4)  # warm
            began_ns = clock.now_ns()
            made_tokens = sum(map(len, drive(engine, load, outputs).values()))
            spent_s = (clock.now_ns() - began_ns) / clock.NS_PER_S
            found["tokens_per_s"][count] = round(made_tokens / spent_s, 1)
        if self.cuda:
            plan = engine._room.plan
            taken = torch.cuda.max_memory_allocated(self.device) - before
            found["memory"] = {
                "planned": plan.total_bytes,
                "taken_at_most": taken,
                "ratio": round(plan.total_bytes / taken, 3),
            }
            found["ok"] = abs(plan.total_bytes - taken) <= PLANNED_WITHIN * taken
        engine.close()
        return found

    def transformers(self) -> dict[str, Any]:
        """Tokens a second of Transformers' own continuous batching, on the same prompts."""
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        dtype = torch.bfloat16 if self.cuda else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=dtype, attn_implementation="sdpa")
        model = model.to(self.device).eval()
        running, inputs, outputs = LOADS[self.size]
        # On a CPU its defaults take gigabytes for a toy; on a GPU they are its own to choose.
        small = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64} if not self.cuda else {}
        found: dict[str, Any] = {}
        for count in running:
            if clock.now_ns() > self._until_ns:
                found[str(count)] = "left out: no time"
                continue
            load = prompts_of(count, inputs, model.config.vocab_size)
            config = GenerationConfig(max_new_tokens=outputs, do_sample=False, eos_token_id=-1, pad_token_id=0)
            options = ContinuousBatchingConfig(**small)
            model.generate_batch(load, config, options, persistent_manager=True)  # warm: graphs, its own thread
            began_ns = clock.now_ns()
            answers = model.generate_batch(load, config, options, persistent_manager=True)
            spent_s = (clock.now_ns() - began_ns) / clock.NS_PER_S
            made_tokens = sum(len(answer.generated_tokens) for answer in answers.values())
            found[str(count)] = round(made_tokens / spent_s, 1)
        if stop := getattr(model, "destroy_cached_continuous_batching_manager", None):
            stop()
        return {"tokens_per_s": found}

    # ------------------------------------------------------------ helpers

    def spec(self, folder: Path, **keys: Any) -> ModelSpec:
        settings = {"name": "check", "engine": "generate", "model": str(folder), "device": str(self.device)}
        return ModelSpec.model_validate(settings | {"step_tokens": 2048 if self.cuda else 64, "kv_mib": 64} | keys)

    def taken(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0


def made(size: str, dtype: Any, device: Any) -> Any:
    """A llama of random weights, the same each time."""
    torch.manual_seed(SEED)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**SIZES[size], **ids)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # larger weights: flat logits would make every comparison a tie
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model.eval()


def prompts_of(count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(1, vocab_size) for _ in range(tokens - at % 5)] for at in range(count)]


def solo(loaded: Loaded, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of the model as it came, alone."""
    ids = torch.tensor([list(prompt)], device=loaded.device)
    config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in out[0, len(prompt) :]]


def drive(engine: GenerateEngine, prompts: Sequence[Sequence[int]], count: int) -> dict[int, list[int]]:
    """The engine's tokens for each prompt, all added at once."""
    params = Params(max_new_tokens=count, ignore_eos=True)
    engine.add(1, [link.Item(at, ids=link.pack_ids(prompt), params=params) for at, prompt in enumerate(prompts)])
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for report in engine.step():
            if isinstance(report, link.Failed):
                raise RuntimeError(report.message)
            assert isinstance(report, link.Step)
            for row in report.rows:
                tokens.setdefault(row.rid, []).extend(row.tokens)
    return tokens


def agreement(alone: Sequence[Sequence[int]], packed: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How far two lists of answers agree: whole ones, and tokens before the first difference."""
    firsts = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(alone, packed, strict=True)
    ]
    whole = sum(first == len(one) for first, one in zip(firsts, alone, strict=True))
    share = sum(firsts) / sum(map(len, alone))
    return {"whole": whole, "of": len(alone), "before_first_difference": round(share, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Prints JSON; returns 0 if nothing that was checked is wrong."""
    parser = argparse.ArgumentParser(prog="python -m headway.bench.gpu_check", description="Checks that need a GPU.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(SIZES), help="large on a GPU, small on a CPU")
    parser.add_argument("--seconds", type=int, default=420, help="parts that would begin later are left out")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    size = args.size or ("large" if args.device.startswith("cuda") else "small")
    with tempfile.TemporaryDirectory() as folder:
        found = Check(args.device, size, Path(folder), args.seconds).run()
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    wrong = [
        name for name, part in found.items() if isinstance(part, dict) and (part.get("ok") is False or "error" in part)
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
