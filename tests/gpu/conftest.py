"""Tests that need a GPU. On it two runs of one thing have the same bits only where torch is told to see to that."""

import os
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read when CUDA starts

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
