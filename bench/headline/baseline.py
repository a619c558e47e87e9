"""What people run without headway, as fair small servers: plain `generate` behind a queue.

    python -m headway.bench.headline.baseline FOLDER THREADS BATCH WAIT_MS ADDRESS

A ZeroMQ ROUTER takes the same messages as headway's protocol and streams the same deltas; one thread runs the model. A
batch is taken when the model is free, and when BATCH requests wait or the oldest has waited WAIT_MS: never closed early
and then queued, which would be worse. It is padded on the left and runs until its longest answer is done; each row's
tokens are sent as they come and its result when it has all of them. BATCH 1 and WAIT_MS 0 is one at a time.
"""

import sys
import threading
from collections import deque
from typing import Any

import msgspec
import torch
import zmq
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from headway.scheduler import clock

POLL_MS = 1000
OUT = "inproc://out"


class Length(msgspec.Struct):
    """Of its parameters, what is read."""

    max_new_tokens: int


class Wanted(msgspec.Struct):
    """One request: of its message, what is read; and from whom and when it came."""

    id: str
    input_ids: list[int]
    params: Length
    client: bytes = b""
    at_ns: int = 0


class Queue:
    """Requests that wait, and when a batch of them is to be taken."""

    def __init__(self, batch: int, wait_ms: float) -> None:
        self._batch, self._wait_ns = batch, int(wait_ms * clock.NS_PER_MS)
        self._waiting: deque[Wanted] = deque()
        self._changed = threading.Condition()

    def put(self, one: Wanted) -> None:
        """It has arrived."""
        with self._changed:
            self._waiting.append(one)
            self._changed.notify()

    def take(self) -> list[Wanted]:
        """The next batch; blocks until there is one."""
        with self._changed:
            while (left_ns := self._left_ns(clock.now_ns())) != 0:
                self._changed.wait(None if left_ns is None else left_ns / clock.NS_PER_S)
            return [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]

    def _left_ns(self, now_ns: int) -> int | None:
        """Until a batch may be taken: 0 now, None not before another comes."""
        if not self._waiting:
            return None
        if len(self._waiting) >= self._batch:
            return 0
        return max(0, self._waiting[0].at_ns + self._wait_ns - now_ns)


class Teller:
    """A stopping criterion that sends each row's new token, and stops a row that has all of its own."""

    def __init__(self, part: list[Wanted], out: "zmq.Socket[bytes]") -> None:
        self._part, self._out, self._made = part, out, 0

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        self._made += 1
        tokens: list[int] = input_ids[:, -1].tolist()
        done = []
        for one, token in zip(self._part, tokens, strict=True):
            if self._made <= one.params.max_new_tokens:
                self._send(one, {"type": "delta", "id": one.id, "token_ids": [token]})
            if self._made == one.params.max_new_tokens:
                self._send(one, {"type": "result", "id": one.id, "finish_reason": "length"})
            done.append(self._made >= one.params.max_new_tokens)
        return torch.tensor(done)

    def _send(self, one: Wanted, message: dict[str, object]) -> None:
        self._out.send_multipart([one.client, msgspec.msgpack.encode(message)])


def generate(model: Any, part: list[Wanted], out: "zmq.Socket[bytes]") -> None:
    """One static batch."""
    width = max(len(one.input_ids) for one in part)
    pads = [width - len(one.input_ids) for one in part]
    model.generate(
        input_ids=torch.tensor([[0] * pad + one.input_ids for pad, one in zip(pads, part, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=max(one.params.max_new_tokens for one in part),
        stopping_criteria=StoppingCriteriaList([Teller(part, out)]),
    )


def _work(context: "zmq.Context[zmq.Socket[bytes]]", folder: str, queue: Queue) -> None:
    out = context.socket(zmq.PAIR)
    out.connect(OUT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # answers have the length that is asked for, as everywhere here
    while True:
        generate(model, queue.take(), out)


def serve(folder: str, threads: int, batch: int, wait_ms: float, address: str) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, made = context.socket(zmq.ROUTER), context.socket(zmq.PAIR)
    made.bind(OUT)
    queue = Queue(batch, wait_ms)
    threading.Thread(target=_work, args=(context, folder, queue), daemon=True).start()
    router.bind(address)
    poller = zmq.Poller()
    for socket in (router, made):
        poller.register(socket, zmq.POLLIN)
    decode = msgspec.msgpack.Decoder(Wanted).decode
    while True:
        for socket, _ in poller.poll(POLL_MS):
            first, raw = socket.recv_multipart()
            if socket is made:
                router.send_multipart([first, raw])
                continue
            one = decode(raw)
            one.client, one.at_ns = first, clock.now_ns()
            queue.put(one)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
