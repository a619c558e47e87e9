"""Transformers by itself, in a process of its own: one at a time, static padded batches, its continuous batching.

Reads one job a line from standard input and answers each with one line, both JSON (`Job`, `Done`), so that the model is
loaded once for all rounds and nothing it does touches the measuring process.
"""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteriaList,
)

from headway.bench.generate.work import Answer, Done, Job, Work
from headway.scheduler import clock

STEP_TOKENS = 256  # of continuous batching: as headway's default
PAGE_TOKENS = 32
RESULT_S_MAX = 120


class Stamps:
    """A stopping criterion that never stops anything; it notes when each step ended."""

    def __init__(self) -> None:
        self.at_ns: list[int] = []

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        self.at_ns.append(clock.now_ns())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def static(model: Any, work: list[Work], batch: int) -> Iterator[Answer]:
    """In order of arrival, padded on the left, each batch until its longest answer is done; surplus is not counted."""
    for start in range(0, len(work), batch):
        part = work[start : start + batch]
        width = max(len(one.ids) for one in part)
        ids = torch.tensor([[0] * (width - len(one.ids)) + one.ids for one in part])
        mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in part])
        stamps, sent_ns = Stamps(), clock.now_ns()
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=max(one.new for one in part),
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        for row, one in enumerate(part):
            yield Answer(sent_ns, stamps.at_ns[: one.new], out[row, width : width + one.new].tolist())


def continuous(model: Any, work: list[Work], batch: int) -> list[Answer]:
    """Transformers' own manager, a closed loop: `batch` requests in flight, the next enters as one ends."""
    tokens = max(len(one.ids) + one.new for one in work)
    blocks = batch * (tokens // PAGE_TOKENS + 2)
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=blocks,
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=batch,
        allow_block_sharing=False,
    )
    never = model.config.vocab_size - 1
    general = GenerationConfig(
        do_sample=False, max_new_tokens=max(one.new for one in work), eos_token_id=never, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=general, continuous_batching_config=config)
    with torch.inference_mode():
        manager.start()
    sent: dict[str, int] = {}
    stamps: dict[str, list[int]] = {}
    ids: dict[str, list[int]] = {}
    waiting = iter(enumerate(work))

    def send() -> None:
        for at, one in waiting:
            sent[f"r{at}"] = clock.now_ns()
            manager.add_request(
                one.ids, request_id=f"r{at}", max_new_tokens=one.new, streaming=True, eos_token_id=never
            )
            return

    for _ in range(batch):
        send()
    open_ = len(work)
    while open_:
        out = manager.get_result(timeout=RESULT_S_MAX)
        if out is None:
            raise RuntimeError(f"continuous batching gave no output in {RESULT_S_MAX} s")
        seen = stamps.setdefault(out.request_id, [])
        seen += [clock.now_ns()] * (len(out.generated_tokens) - len(seen))
        if out.is_finished():
            ids[out.request_id] = list(out.generated_tokens)
            open_ -= 1
            send()
    manager.stop(block=True)
    return [Answer(sent[f"r{at}"], stamps[f"r{at}"], ids[f"r{at}"]) for at in range(len(work))]


def main() -> None:
    """Arguments: the folder of the model, threads. Says `ready` when it is."""
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    print("ready", flush=True)
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        if job.way == "continuous":
            answers = continuous(model, job.work, job.concurrency)
        else:
            answers = list(static(model, job.work, 1 if job.way == "solo" else job.concurrency))
        print(msgspec.json.encode(Done(answers)).decode(), flush=True)


if __name__ == "__main__":
    main()
