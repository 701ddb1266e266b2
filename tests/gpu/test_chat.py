"""Conversations on a GPU: the same answers in its memory, streamed from host memory, and on the CPU."""

import gc
from pathlib import Path

import pytest
import torch

from benchmarks.page_locking import lockable
from rptrain.inference.free_memory import free_memory
from rptrain.inference.load import LoadedChat
from rptrain.inference.placement import Sizes
from rptrain.inference.settings import AnswerSettings
from rptrain.runs.folder.run_dir import RunDir

from .. import run_tools as tools

pytestmark = pytest.mark.gpu

GREEDY = AnswerSettings(temperature=0, max_new_tokens=8)
PLACEMENTS = ("gpu", "streamed", "cpu")
ROUNDING = 1 << 15  # bytes: the allocator rounds the size of each unit, and the tables of rotary embeddings are small
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BASES = pytest.mark.parametrize("base", ["bf16", "nf4", "mxfp4"])


def trained(folder: Path, base: str) -> RunDir:
    """Adapters in float32 on a base in this format, exported."""
    tools.write_model(folder / "model", **SIZES)
    return tools.train_here(folder, "lora.r=3", "optim.learning_rate=0.1", f"lora.base={base}")


def answers(source: Path, placement: str) -> list[str]:
    """Of the tuned model and of its base, in two turns."""
    loaded = LoadedChat(source, free_memory(), placement)
    assert loaded.model.dtype is torch.float32 and loaded.placement.kind == placement
    loaded.chat.settings = GREEDY
    loaded.load_base()
    found = []
    for said in ("Sort: 321", "Sort: 54"):
        found += ["".join(loaded.chat.ask(said)), "".join(loaded.chat.ask_base())]
    return found


@BASES
def test_the_same_answers_wherever_the_model_is(tmp_path: Path, base: str) -> None:
    run = trained(tmp_path, base)
    for source in (run.path, run.checkpoints()[-1]):
        on_gpu, streamed, on_cpu = (answers(source, placement) for placement in PLACEMENTS)
        assert on_gpu == streamed == on_cpu and on_gpu[0] != on_gpu[1]
    assert tools.generated(run.path, ["Sort: 321"], GREEDY.max_new_tokens, 0.0, 0, raw=False) == on_gpu[:1]


def test_the_same_answers_however_much_is_locked(tmp_path: Path) -> None:
    run = trained(tmp_path, "bf16")
    expected = answers(run.path, "streamed")
    for limit in (1 << 18, 0):
        with lockable(limit):
            assert answers(run.path, "streamed") == expected


@BASES
def test_a_quantized_base_stays_so_in_gpu_memory(tmp_path: Path, base: str) -> None:
    """For the exported adapter and for the checkpoint. Streamed, the GPU has less still."""
    run = trained(tmp_path, base)
    for source in (run.path, run.checkpoints()[-1]):
        taken = {}
        for placement in ("gpu", "streamed"):
            gc.collect()
            before = torch.cuda.memory_allocated()
            loaded = LoadedChat(source, free_memory(), placement)
            taken[placement] = torch.cuda.memory_allocated() - before
            sizes = Sizes.of(loaded.model.spec, loaded.model.dtype)
            del loaded
        assert sizes.packed <= taken["gpu"] <= sizes.packed + ROUNDING
        assert taken["streamed"] < taken["gpu"]
        assert (2 * sizes.packed < sizes.weights) is (base != "bf16")
