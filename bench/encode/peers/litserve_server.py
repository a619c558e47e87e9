"""LitServe with its own batching: a FastAPI process and one worker process."""

from typing import Any

import litserve
from work import MAX_BATCH, MAX_WAIT_MS, PORT, MiniLM  # type: ignore[import-not-found]


class Encoder(litserve.LitAPI):
    """One batch at a time, in the order of arrival."""

    def setup(self, device: str) -> None:
        del device
        self._work = MiniLM()

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def predict(self, texts: list[str]) -> list[list[float]]:
        found: list[list[float]] = self._work(texts)
        return found

    def encode_response(self, vector: list[float]) -> dict[str, Any]:
        return {"y": vector}


if __name__ == "__main__":
    api = Encoder(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_MS / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=PORT, num_api_servers=1, log_level="warning", generate_client_file=False)
