"""What a step costs beside the model, and what a long prompt does to the answers that run beside it.

The first is measured in the engine itself: the time of steps with a given number of running requests, less the time
inside the model's forward. The second goes the whole way through a server: the longest wait of any stream between two
tokens, over the median wait.
"""

import statistics
import sys
from collections.abc import Sequence

import anyio
import msgspec

from headway.bench.generate.ways import Headway, ask
from headway.bench.generate.work import Answer, Work, gaps_ms
from headway.scheduler import clock, link
from headway.scheduler.client import Client
from headway.scheduler.spec import ModelSpec
from headway.scheduler.wire import Params

WARM_STEPS, STEPS = 4, 40
STEPS_MAX = 400  # until all prompts are read and the measured steps are done
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 32, 300
BEFORE_LONG_TOKENS = 12  # of the first stream, before the long prompt comes


class Overhead(msgspec.Struct, frozen=True):
    """`share`: of a step's time that is not the model's forward."""

    running: int
    step_ms: float
    share: float


class LongPrompt(msgspec.Struct, frozen=True):
    """Waits between tokens of the streams, in ms; `alone`: before the long prompt came."""

    prompt_tokens: int
    streams: int
    median_ms: float
    alone_median_ms: float
    longest_ms: float
    ttft_ms: float

    @property
    def ratio(self) -> float:
        """The longest wait over the median one."""
        return self.longest_ms / self.median_ms


def overhead(folder: str, threads: int, running: int) -> Overhead:
    """Loads the model into this process."""
    from headway.workers.generate.engine import GenerateEngine
    from headway.workers.load import load_model

    spec = ModelSpec(name="m", model=folder, device="cpu", dtype="float32", threads=threads, max_num_seqs=running)
    engine = GenerateEngine(spec, load_model(spec))
    model_ns = 0
    runner = engine._runner
    owner, name = (runner.model, "forward") if runner.flat is None else (runner.flat, "operations")
    forward = getattr(owner, name)

    def timed(*given: object, **named: object) -> object:
        nonlocal model_ns
        began = clock.now_ns()
        try:
            return forward(*given, **named)
        finally:
            model_ns += clock.now_ns() - began

    setattr(owner, name, timed)
    params = Params(max_new_tokens=STEPS_MAX, temperature=0.0, ignore_eos=True)
    for rid in range(running):
        engine.add(1, [link.Item(rid, ids=link.pack_ids(range(10, 10 + 40 + 4 * rid)), params=params)])
    while sum(len(request.tokens) - request.written == 1 for request in engine._running) < running:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    steps, shares = [], []
    for _ in range(STEPS):
        model_ns, began = 0, clock.now_ns()
        engine.step()
        spent = clock.now_ns() - began
        steps.append(spent / clock.NS_PER_MS)
        shares.append(1 - model_ns / spent)
    engine.close()
    return Overhead(running, statistics.median(steps), statistics.median(shares))


def long_prompt(way: Headway, streams: Sequence[Work], prompt: Work) -> LongPrompt:
    """`prompt` arrives while `streams` run."""
    return anyio.run(_long_prompt, way.address, streams, prompt)


async def _long_prompt(address: str, streams: Sequence[Work], prompt: Work) -> LongPrompt:
    answers: dict[int, Answer] = {}
    arrived = list[int]()
    running = anyio.Event()

    async def watch(client: Client, at: int, one: Work) -> None:
        sent_ns, stamps = clock.now_ns(), list[int]()
        stream = client.stream(input_ids=one.ids, max_new_tokens=one.new, temperature=0.0, ignore_eos=True)
        async for delta in stream:
            stamps += [clock.now_ns()] * len(delta.token_ids)
            if at == len(streams) - 1 and len(stamps) >= BEFORE_LONG_TOKENS:
                running.set()
        answers[at] = Answer(sent_ns, stamps)

    async with Client(address, concurrency=len(streams) + 1) as client, anyio.create_task_group() as group:
        for at, one in enumerate(streams):
            group.start_soon(watch, client, at, one)
        await running.wait()
        arrived.append(clock.now_ns())
        long = await ask(client, prompt)
    begin = max(answer.stamps_ns[0] for answer in answers.values())  # all of them run
    during = [_from(answer, begin) for answer in answers.values()]
    before = [Answer(0, [at for at in answer.stamps_ns if at < arrived[0]]) for answer in during]
    gaps = gaps_ms(during)
    return LongPrompt(
        prompt_tokens=len(prompt.ids),
        streams=len(streams),
        median_ms=statistics.median(gaps),
        alone_median_ms=statistics.median(gaps_ms(before)),
        longest_ms=max(gaps),
        ttft_ms=(long.stamps_ns[0] - long.sent_ns) / clock.NS_PER_MS,
    )


def _from(answer: Answer, begin_ns: int) -> Answer:
    return Answer(answer.sent_ns, [at for at in answer.stamps_ns if at >= begin_ns])


if __name__ == "__main__":  # folder, threads, running: prints an Overhead as JSON
    print(msgspec.json.encode(overhead(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).decode())
