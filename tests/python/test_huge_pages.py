import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepack import huge_pages

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("shape", [(3,), (0, 5), (2, 100), (HUGE_PAGE,), (3, HUGE_PAGE + 17)])
def test_a_tensor_as_any_other(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = huge_pages.empty(*shape)
    assert tensor.shape == shape
    assert tensor.dtype == torch.uint8
    assert tensor.is_contiguous()
    tensor.copy_(torch.randint(0, 256, shape, dtype=torch.uint8))
    assert tensor.untyped_storage().nbytes() == tensor.numel()
    assert torch.equal(copy.deepcopy(tensor), tensor)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), tensor)
    save_file({"t": tensor}, tmp_path / "t.safetensors")
    assert torch.equal(load_file(tmp_path / "t.safetensors")["t"], tensor)


def test_large_tensors_begin_on_a_huge_page() -> None:
    assert huge_pages.empty(2, HUGE_PAGE).data_ptr() % HUGE_PAGE == 0


def test_the_system_gives_huge_pages_where_it_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system gives no transparent huge pages")
    tensor = huge_pages.empty(8, HUGE_PAGE).fill_(1)
    assert _huge_kilobytes(tensor.data_ptr()) >= 8 << 10


def _huge_kilobytes(address: int) -> int:
    """AnonHugePages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1])
    return 0
