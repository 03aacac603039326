"""Memory on huge pages for weights: decoding reads all of them once per token.

With 4 KiB pages every access to new weights also waits for the page table; with 2 MiB pages hardly
one does. Linux gives them where a program asks (`madvise`), if the system allows it
(/sys/kernel/mm/transparent_hugepage/enabled: always or madvise).
"""

import mmap
from math import prod

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def empty(*shape: int) -> Tensor:
    """An uninitialized uint8 tensor, on huge pages where the system has them and it fills one."""
    size = prod(shape)
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.uint8)
    # An own mapping, aligned by taking one page more: only whole huge pages can be huge.
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    # The tensor keeps the mapping alive; its storage is just these bytes, so files do not grow.
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(shape)
