"""What all tests share: asyncio as the one event loop, and `--rewrite`, which writes expected files anew."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub reads it: no test asks a hub


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write expected files anew instead of comparing them")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether expected files are to be written anew; a reviewer reads the difference."""
    return bool(request.config.getoption("--rewrite"))
