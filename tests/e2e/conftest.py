"""End-to-end tests run as a user runs the program: on as many threads as torch chooses here.

Bits depend on their number, so it is put back to what it was before ``tests/conftest.py`` set it.
``OMP_NUM_THREADS=1 make test`` is the way on a busy machine: threads that wait for a core cost tenfold.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftproof.models.load import resolve

_NUM_THREADS = torch.get_num_threads()


@pytest.fixture(scope="package", autouse=True)
def _default_threads(_two_threads: None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(_NUM_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The packaged default model in bfloat16, from the user's own cache."""
    return resolve("smollm2-135m-instruct", "bfloat16")
