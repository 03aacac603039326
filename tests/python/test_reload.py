"""New weights in the tensors of a packed model: the bytes of a fresh load, or the old ones."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from made_checkpoints import copied, encoded, fp8_block, saved, stored_tensors
from moepack.errors import BadWeights, UnsupportedError
from moepack.modules import QuantizedMoEFFN
from moepack.online import Settings, load, quantize_checkpoint
from moepack.online.memory import anonymous_bytes
from moepack.weight_lock import WeightLock

ONE = Settings(threads=1)
FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "gemma4_text", "dbrx", "lfm2_moe"]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


def in_memory(model: nn.Module) -> nn.Module:
    """Weights that are mapped from a file are the file's: a served model owns its memory."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    first = saved(tiny_models.build("qwen3_moe"), tmp_path / "a")
    return first, saved(tiny_models.build("qwen3_moe", seed=5), tmp_path / "b")


def packed(directory: Path, **options: Any) -> nn.Module:
    return in_memory(load(directory, Settings(threads=1, **options)).model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["path", "state_dict", "pieces"])
def test_own_weights_and_others(family: str, form: str, tmp_path: Path) -> None:
    own = saved(tiny_models.build(family), tmp_path / "a")
    other = saved(tiny_models.build(family, seed=3), tmp_path / "b")

    def source(directory: Path) -> Any:
        if form == "path":
            return str(directory)
        tensors = stored_tensors(directory)
        pieces = list(tensors.items())
        random.Random(1).shuffle(pieces)
        return tensors if form == "state_dict" else iter(pieces)

    model = packed(own)
    before, addresses, logits = state(model), pointers(model), tiny_models.logits(model)
    for _ in range(2):
        moepack.reload_weights(model, source(own), settings=ONE)
        assert different(state(model), before) == set()
        assert torch.equal(tiny_models.logits(model), logits)
    done = moepack.reload_weights(model, source(other), settings=ONE)
    assert different(state(model), state(packed(other))) == set()
    assert pointers(model) == addresses
    assert done.tensors >= len(before)
    assert not torch.equal(tiny_models.logits(model), logits)


@pytest.mark.parametrize("router", ["auto", "outside"])
def test_schemes_and_routers_are_those_of_the_model(router: Any, tmp_path: Path) -> None:
    a = saved(tiny_models.build("mixtral", num_hidden_layers=3), tmp_path / "a")
    b = saved(tiny_models.build("mixtral", num_hidden_layers=3, seed=4), tmp_path / "b")
    recipe = {"*.1.mlp": "float", "*.2.mlp": "int8-g128"}
    options: dict[str, Any] = {"scheme": "int4-g64", "recipe": recipe, "router": router}
    from transformers import AutoModelForCausalLM

    float_model = AutoModelForCausalLM.from_pretrained(a, dtype=torch.float32).eval()
    model = in_memory(moepack.quantize_(float_model, **options, verify=False).model)
    moepack.reload_weights(model, b, settings=ONE)
    assert different(state(model), state(packed(b, **options))) == set()


def test_an_fp8_checkpoint_into_a_model_that_was_plain(tmp_path: Path) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "a")
    tensors = stored_tensors(source)
    stored, exact = encoded(tensors, lambda n, t: fp8_block(n, t) if "experts" in n else None)
    model = packed(source)
    moepack.reload_weights(model, iter(stored.items()), settings=ONE)
    expected = packed(copied(source, tmp_path / "exact", exact))
    assert different(state(model), state(expected)) == set()


def test_what_no_checkpoint_holds_is_untouched(tmp_path: Path) -> None:
    a = saved(tiny_models.build("deepseek_v3"), tmp_path / "a")
    b = saved(tiny_models.build("deepseek_v3", seed=5), tmp_path / "b")
    model = packed(a)
    before = state(model)
    bias = "model.layers.1.mlp.expert_bias"
    assert before[bias].abs().sum() > 0
    tensors = {n: t for n, t in stored_tensors(b).items() if "correction_bias" not in n}
    for source in (tensors, iter(tensors.items())):
        moepack.reload_weights(model, source, settings=ONE)
        expected = state(packed(b)) | {bias: before[bias]}
        assert different(state(model), expected) == set()


def damaged(tensors: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    down = "model.layers.1.mlp.experts.5.down_proj.weight"
    found = {n: t.clone() for n, t in tensors.items()}
    if how == "missing":
        del found[down]
    elif how == "shape":
        found[down] = found[down][:-1].contiguous()
    elif how == "nan":
        found[down][3, 7] = torch.nan
    elif how == "nan elsewhere":
        found["model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.inf
    elif how == "router":
        found["model.layers.1.mlp.gate.weight"][0, 0] = torch.nan
    return found


@pytest.mark.parametrize("as_pieces", [False, True])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"layers\.1: missing: .*down_proj expert 5"),
        ("shape", r"layers\.1: .*experts\.5\.down_proj\.weight"),
        ("nan", r"layers\.1: .*layers\.1\.mlp expert 5 w2: .*row 3, column 7"),
        ("nan elsewhere", r"layers\.1: model\.layers\.1\.self_attn\.q_proj\.weight"),
        ("router", r"layers\.1: .*gate\.weight"),
    ],
)
def test_a_bad_layer_keeps_its_old_weights(
    how: str, message: str, as_pieces: bool, checkpoints: tuple[Path, Path]
) -> None:
    model = packed(checkpoints[0])
    old, new = state(model), state(packed(checkpoints[1]))
    tensors = damaged(stored_tensors(checkpoints[1]), how)
    with pytest.raises(BadWeights, match=message):
        moepack.reload_weights(model, iter(tensors.items()) if as_pieces else tensors, settings=ONE)
    kept = {name for name in old if name.startswith("model.layers.1.")}
    expected = {name: old[name] if name in kept else new[name] for name in old}
    assert different(state(model), expected) == set()
    assert tiny_models.logits(model).isfinite().all()
    moepack.reload_weights(model, checkpoints[1], settings=ONE)
    assert different(state(model), new) == set()


def test_names_of_another_model_are_reported(checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    tensors = stored_tensors(checkpoints[1]) | {
        "model.layers.9.mlp.gate.weight": torch.zeros(8, 64)
    }
    with pytest.raises(BadWeights, match=r"does not have: model\.layers\.9\.mlp\.gate\.weight"):
        moepack.reload_weights(model, tensors, settings=ONE)


def test_partial_replaces_what_came(checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    old, new = state(model), state(packed(checkpoints[1]))
    wanted = (
        "layers.1.mlp.experts.5.",
        "layers.0.mlp.gate",
        "model.norm",
        "layers.1.self_attn.q_p",
    )
    tensors = {
        n: t for n, t in stored_tensors(checkpoints[1]).items() if any(w in n for w in wanted)
    }
    for source in (tensors, iter(tensors.items())):
        moepack.reload_weights(model, source, partial=True, settings=ONE)
        found = state(model)
        for name in old:
            expected = old[name]
            if name.endswith(
                ("0.mlp.gate_weight", "model.norm.weight", "1.self_attn.q_proj.weight")
            ):
                expected = new[name]
            elif "layers.1.mlp.packed" in name:
                expected = torch.cat([old[name][:5], new[name][5:6], old[name][6:]])
            assert torch.equal(found[name], expected), name


def test_half_an_expert_is_reported(checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    before = state(model)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors = {name: stored_tensors(checkpoints[1])[name]}
    with pytest.raises(BadWeights, match=r"came in part: .*gate_up_proj expert 5"):
        moepack.reload_weights(model, iter(tensors.items()), partial=True, settings=ONE)
    assert different(state(model), before) == set()


def test_models_that_cannot_be_reloaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds no module packed"):
        moepack.reload_weights(tiny_models.build("qwen3_moe"), {})
    block = moepack.quantize_(tiny_models.executorch_block(), verify=False).model
    with pytest.raises(UnsupportedError, match="no transformers model"):
        moepack.reload_weights(block, {})


@pytest.mark.parametrize("serves", [True, False])
def test_a_hundred_updates_while_two_threads_run_the_model(
    serves: bool, checkpoints: tuple[Path, Path]
) -> None:
    """Under `serving` a forward is all old or all new, without it every packed layer is."""
    model: Any = packed(checkpoints[0])
    sources = [stored_tensors(directory) for directory in checkpoints]
    frozen, logits = [], []
    for source in sources:
        moepack.reload_weights(model, source, settings=ONE)
        frozen.append(copy.deepcopy(model))
        logits.append(tiny_models.logits(model))
    assert not torch.equal(*logits)
    layers = [f"model.layers.{n}.mlp" for n in range(2)]
    stop, addresses = threading.Event(), pointers(model)
    wrong: list[str] = []
    forwards = [0, 0]

    def check_layer(path: str, x: Tensor, y: Tensor) -> None:
        if not any(torch.equal(y, twin.get_submodule(path)(x)) for twin in frozen):
            wrong.append(path)

    for path in layers:
        model.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: check_layer(path, inputs[0], output)
        )

    def run(thread: int) -> None:
        while not stop.is_set():
            with moepack.serving(model) if serves else nullcontext():
                found = tiny_models.logits(model)
            if serves and not any(torch.equal(found, expected) for expected in logits):
                wrong.append("logits")
            forwards[thread] += 1

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    grown = []
    try:
        for update in range(100):
            moepack.reload_weights(model, sources[update % 2], settings=ONE)
            if update % 45 == 9:
                grown.append(anonymous_bytes())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert min(forwards) > 0
    assert pointers(model) == addresses
    assert grown[-1] - grown[0] < 3 * sum(t.nbytes for t in sources[0].values())


def test_memory_does_not_grow_with_updates(checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    tensors = stored_tensors(checkpoints[1])

    def update(times: int) -> int:
        for _ in range(times):
            moepack.reload_weights(model, iter(tensors.items()), settings=ONE)
        return anonymous_bytes()

    after_first = update(10)
    assert update(40) - after_first < 3 * sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nllb-moe"])
@pytest.mark.parametrize("form", ["state_dict", "directory"])
def test_the_weights_of_a_model_packed_alike(family: str, form: str, tmp_path: Path) -> None:
    model = packed(saved(tiny_models.build(family), tmp_path / "a"))
    b = saved(tiny_models.build(family, seed=5), tmp_path / "b")
    other, addresses = packed(b), pointers(model)
    source: Any = other.state_dict()
    if form == "directory":
        source = quantize_checkpoint(b, tmp_path / "packed", ONE).directory
    moepack.reload_weights(model, source, settings=ONE)
    assert different(state(model), state(other)) == set()
    assert pointers(model) == addresses


@pytest.mark.parametrize("how", ["scheme", "damaged", "one by one", "missing"])
def test_packed_weights_that_do_not_fit(how: str, checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    before = state(model)
    name = "model.layers.1.mlp.packed_w2"
    source: Any = state(packed(checkpoints[1]))
    message = name
    if how == "scheme":
        source, message = state(packed(checkpoints[1], scheme="int4-g64")), "packed_w2 is"
    elif how == "damaged":
        source[name][3, -1] ^= 1
        message = "layers.1: .*checksum"
    elif how == "missing":
        del source[name]
    else:
        source, message = iter(source.items()), "not one by one"
    with pytest.raises(BadWeights, match=message):
        moepack.reload_weights(model, source, settings=ONE)
    assert not {n for n in different(state(model), before) if "layers.1.mlp" in n}


def test_compiled_callers_see_new_weights_at_the_same_addresses(
    checkpoints: tuple[Path, Path],
) -> None:
    model = packed(checkpoints[0])
    block: QuantizedMoEFFN = model.get_submodule("model.layers.0.mlp")  # type: ignore[assignment]
    x = torch.randn(6, tiny_models.WIDTH)
    exported = torch.export.export(block, (x,)).module()
    assert torch.equal(exported(x), block(x))
    before = block(x)
    moepack.reload_weights(model, checkpoints[1], settings=ONE)
    assert torch.equal(exported(x), block(x))
    assert not torch.equal(block(x), before)


def test_a_packed_module_with_a_lock_is_copied_and_pickled(checkpoints: tuple[Path, Path]) -> None:
    model = packed(checkpoints[0])
    block: QuantizedMoEFFN = model.get_submodule("model.layers.0.mlp")  # type: ignore[assignment]
    with block.lock.reading():
        for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            with twin.lock.writing():
                pass


def test_readers_go_on_together_and_a_writer_waits() -> None:
    lock, order = WeightLock(), []

    def write() -> None:
        with lock.writing():
            order.append("written")

    with lock.reading():
        writer = threading.Thread(target=write)
        writer.start()
        with lock.reading():  # the same thread, though a writer waits
            order.append("read twice")
    writer.join(10)
    assert order == ["read twice", "written"]
