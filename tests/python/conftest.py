"""One thread: on tiny tensors OpenMP's threads only wait for each other (300 times slower on a busy
machine). Tests of threads set their own number."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def default_isa_and_threads() -> Iterator[None]:
    """For tests that force an instruction set or a number of threads: as it was, afterwards."""
    from moepack import ops

    threads = torch.get_num_threads()
    yield
    ops.force_isa(None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def upstreams_operator() -> None:
    """For tests that call it: ExecuTorch's library of custom operators is loaded."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
