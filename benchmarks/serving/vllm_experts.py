"""Whether vLLM reads adapters of experts as rptrain merges them: run in the interpreter of vLLM's environment.

VLLM_PYTHON vllm_experts.py BASE ADAPTER MERGED RANK: loads the model BASE and an adapter of its experts with vLLM, at
that max_lora_rank, computes no answer, and prints the largest difference between the products of the adapter's matrices
as vLLM holds them and MERGED - BASE, and the largest of these. The models are in float32, in one file each, of an
architecture with gate_proj, up_proj and down_proj for each expert. vLLM's build for the CPU loads such adapters, but
does not compute them.
"""

import os
import sys
from importlib import import_module
from typing import Any

from safetensors.torch import load_file

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["HF_HUB_OFFLINE"] = "1"


def main(base: str, adapter: str, merged: str, rank: str) -> None:
    vllm, request = import_module("vllm"), import_module("vllm.lora.request").LoRARequest
    lora = {"enable_lora": True, "max_lora_rank": int(rank), "enable_mixed_moe_lora_format": True}
    engine: Any = vllm.LLM(base, dtype="float32", max_model_len=256, enforce_eager=True, **lora).llm_engine
    engine.add_lora(request("experts", 1, adapter, is_3d_lora_weight=True))
    runner = engine.model_executor.driver_worker.worker.model_runner
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (base, merged))
    largest = difference = 0.0
    for name, module in runner.lora_manager._adapter_manager.modules.items():
        if not hasattr(module, "w13_lora_a_stacked"):
            continue
        a_of_gate, a_of_up = module.w13_lora_a_stacked
        b_of_gate, b_of_up = module.w13_lora_b_stacked
        factors = {"gate_proj": (a_of_gate, b_of_gate), "up_proj": (a_of_up, b_of_up)}
        factors["down_proj"] = module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
        for matrix, (a, b) in factors.items():
            for expert, product in enumerate(b[0] @ a[0]):
                key = f"{name}.{expert}.{matrix}.weight"
                expected = after[key] - before[key]
                largest = max(largest, expected.abs().max().item())
                difference = max(difference, (product - expected).abs().max().item())
    print(f"largest difference {difference:.1e}, largest value {largest:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
