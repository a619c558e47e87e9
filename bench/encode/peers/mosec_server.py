"""mosec with its own batching: a Rust front, one Python worker. It reads its own flags."""

from typing import Any

from mosec import Server, Worker
from work import MAX_BATCH, MAX_WAIT_MS, MiniLM  # type: ignore[import-not-found]


class Encoder(Worker):
    """One batch at a time, in the order of arrival."""

    def __init__(self) -> None:
        self._work = MiniLM()

    def forward(self, data: list[dict[str, str]]) -> list[dict[str, Any]]:
        return [{"y": vector} for vector in self._work([one["text"] for one in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Encoder, num=1, max_batch_size=MAX_BATCH, max_wait_time=int(MAX_WAIT_MS))
    server.run()
