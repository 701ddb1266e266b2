"""Adapters that are continued in training, or generate text."""

from collections.abc import Iterator
from typing import Any

from benchmarks.bad_inputs.case import TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import PICKLE, cut, deleted, fifo, tensors, text, values
from benchmarks.bad_inputs.sound import ADAPTER

AREA = "adapters"
CONFIG, WEIGHTS = "ad/adapter_config.json", "ad/adapter_model.safetensors"
CONTINUE = (*TRAIN, *ADAPTER)
GENERATE = ("generate", "ad", "--prompt", "hi", "--max-new-tokens", "3")

# Number of training with it, number of generating with it, name, values of adapter_config.json, and both outcomes.
BOTH: tuple[tuple[int, int, str, dict[str, Any], Outcome, Outcome], ...] = (
    (243, 244, "unchanged", {}, "taken", "taken"),
    (245, 246, "r of text", {"r": "4"}, "refused", "refused"),
    (247, 248, "r of 10**30", {"r": 10**30}, "refused", "refused"),
    (249, 250, "negative r", {"r": -4}, "refused", "refused"),
    (251, 252, "r of zero", {"r": 0}, "refused", "refused"),
    (253, 254, "r that is not whole", {"r": 4.0}, "either", "either"),
    (255, 256, "r of null", {"r": None}, "refused", "refused"),
    (257, 258, "infinite lora_alpha", {"lora_alpha": float("inf")}, "refused", "refused"),
    (259, 260, "undefined lora_alpha", {"lora_alpha": float("nan")}, "refused", "refused"),
    (261, 262, "lora_alpha of zero", {"lora_alpha": 0}, "either", "either"),
    (263, 264, "lora_alpha of 1e308", {"lora_alpha": 1e308}, "refused", "refused"),
    (265, 266, "lora_alpha of 10**400", {"lora_alpha": 10**400}, "refused", "refused"),
    (267, 268, "another method", {"peft_type": "LOHA"}, "refused", "refused"),
    (269, 270, "methods in a list", {"peft_type": ["LORA"]}, "refused", "refused"),
    (271, 272, "biases", {"bias": "all"}, "refused", "refused"),
    (273, 274, "initialization that changes the base", {"init_lora_weights": "pissa"}, "refused", "refused"),
    (275, 276, "initialization of a table", {"init_lora_weights": {"a": 1}}, "refused", "refused"),
    (277, 278, "ranks by pattern", {"rank_pattern": {"q_proj": 8}}, "refused", "refused"),
    (279, 280, "base that is not there", {"base_model_name_or_path": "/no/such/model"}, "either", "refused"),
)
# Number, name and value of the base for generating; a refusal names the key.
BASES: tuple[tuple[int, str, Any], ...] = (
    (281, "empty base", ""),
    (282, "base of an unknown user", "~nosuchuser/x"),
    (283, "base with a null character", "a\0b"),
    (284, "base that is a number", 5),
    (285, "base that is a list", ["model"]),
    (286, "base that is /etc", "/etc"),
    (287, "base of 5,000 characters", "x" * 5000),
    (288, "base that is a table", {"path": "model"}),
    (289, "base with half a character", "a\ud800"),
    (290, "base on the hub with a null character", "a/b\0"),
    (291, "base that is a pattern", "mod*"),
    (745, "base on the hub with half a character", "a/\ud800"),
    (746, "base on the hub with dots", "../.."),
)
# Number, name, command, values and outcome.
OTHERS: tuple[tuple[int, str, tuple[str, ...], dict[str, Any], Outcome], ...] = (
    (292, "base of an unknown user", CONTINUE, {"base_model_name_or_path": "~nosuchuser/x"}, "either"),
    (293, "base that is a number", CONTINUE, {"base_model_name_or_path": 5}, "refused"),
    (294, "base with a null character", CONTINUE, {"base_model_name_or_path": "a\0b"}, "either"),
    (744, "base with an escape sequence", CONTINUE, {"base_model_name_or_path": "\x1b[31mred"}, "either"),
    (295, "experts that are a number", GENERATE, {"target_parameters": 5}, "refused"),
    (296, "catastrophic expression", GENERATE, {"target_modules": "(([a-z0-9_.]+)+)+!"}, "either"),
    (297, "dropout of text", CONTINUE, {"lora_dropout": "x"}, "either"),
    (298, "modules to save that are a number", GENERATE, {"modules_to_save": 5}, "either"),
    (299, "use_rslora of text", CONTINUE, {"use_rslora": "yes"}, "refused"),
    (300, "use_rslora of text", GENERATE, {"use_rslora": "yes"}, "refused"),
    (301, "use_dora without its weights", GENERATE, {"use_dora": True}, "refused"),
)


def renamed(header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    return {f"x.{name}" if name != "__metadata__" else name: tensor for name, tensor in header.items()}, data


def undefined(header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    return header, b"\xff" * len(data)


def of_rank_0(header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Each matrix keeps its other dimension, and has no elements."""
    for name, tensor in header.items():
        if name != "__metadata__":
            place = 0 if "lora_A" in name else 1
            tensor["shape"][place] = 0
            tensor["data_offsets"] = [0, 0]
    return header, b""


# Number of training, number of generating, name, edits, and what a refusal names.
FILES: tuple[tuple[int, int, str, tuple[Edit, ...], str], ...] = (
    (302, 303, "weights cut short", (cut(WEIGHTS, -100),), "adapter_model.safetensors"),
    (304, 305, "weights missing", (deleted(WEIGHTS),), "adapter_model.safetensors"),
    (306, 307, "pickled weights", (deleted(WEIGHTS), text("ad/adapter_model.bin", PICKLE)), "pickled"),
    (308, 309, "weights of other names", (tensors(WEIGHTS, renamed),), "ad"),
    (310, 311, "undefined weights", (tensors(WEIGHTS, undefined),), "adapter_model.safetensors"),
)


def cases() -> Iterator[Case]:
    for training, generating, name, changes, trained, generated in BOTH:
        edit = values(CONFIG, changes)
        key = next(iter(changes), "")
        if key in ("r", "lora_alpha", "init_lora_weights", "rank_pattern", "peft_type", "bias"):
            yield Case(training, AREA, f"training: {name}", CONTINUE, trained, (edit,), key)
        else:
            yield Case(training, AREA, f"training: {name}", CONTINUE, trained, (edit,))
        yield Case(generating, AREA, f"generating: {name}", GENERATE, generated, (edit,), key)
    for number, name, base in BASES:
        edit = values(CONFIG, {"base_model_name_or_path": base})
        yield Case(number, AREA, f"generating: {name}", GENERATE, edits=(edit,), names="base_model_name_or_path")
    for number, name, args, changes, expected in OTHERS:
        does = "training" if args is CONTINUE else "generating"
        yield Case(number, AREA, f"{does}: {name}", args, expected, (values(CONFIG, changes),))
    for training, generating, name, edits, named in FILES:
        yield Case(training, AREA, f"training: {name}", CONTINUE, edits=edits, names=named)
        yield Case(generating, AREA, f"generating: {name}", GENERATE, edits=edits, names=named)
    empty = tensors(WEIGHTS, of_rank_0)
    yield Case(312, AREA, "generating: weights of rank 0", GENERATE, edits=(empty, values(CONFIG, {"r": 0})))
    yield Case(313, AREA, "generating: weights of rank 0, r of 4", GENERATE, edits=(empty,), names="ad")
    garbage = text(CONFIG, "{]")
    yield Case(314, AREA, "generating: broken config", GENERATE, edits=(garbage,), names="adapter_config.json")
    yield Case(315, AREA, "generating: config that is a pipe", GENERATE, edits=(fifo(CONFIG),), names="ad")
    for number, name, overrides, named in (
        (316, "adapter that is a file", ("lora.adapter=data.jsonl",), "data.jsonl"),
        (317, "adapter that is missing", ("lora.adapter=nope",), "nope"),
        (318, "modules that are not there", ('lora.target_modules=["nosuch"]',), "nosuch"),
        (319, "modules to save that are not there", ('lora.modules_to_save=["nosuch"]',), "nosuch"),
        (
            320,
            "experts of a dense model",
            ('lora.target_parameters=["mlp.experts.gate_up_proj"]',),
            "target_parameters",
        ),
    ):
        yield Case(number, AREA, f"training: {name}", (*TRAIN, *overrides), names=named)
