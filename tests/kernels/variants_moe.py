"""What kernels/moe.py and moe_rows.py launch: 128 experts of which 8 (Qwen3-MoE), 32 of which 4 (GPT-OSS)."""

from itertools import product

from rptrain.kernels import moe, moe_rows
from rptrain.kernels.launch import power_of_2
from tests.kernels.compiling import Variant

WIDTHS = (2048, 2880, 4096, 768)  # hidden sizes, and an expert's intermediate size


def _routing(experts: int, active: int, dtype: str) -> list[Variant]:
    rows = moe.ELEMENTS // experts
    sizes = {"ACTIVE": active, "ROWS": rows, "WIDTH": experts, "PLACES": power_of_2(active)}
    common = {"logits": dtype, "choice": "*i32", "weights": dtype, "scale": "fp32", "tokens": "i32", "experts": "i32"}
    grads = common | {"dweights": "*fp32", "dprobs": "*fp32", "counted": "*i1", "dlogits": dtype}
    options = {"num_warps": 4}
    found = [Variant(moe._choose_kernel, common, sizes, options)]
    for over_chosen, sigmoid in product((True, False), (True, False)):
        scoring = sizes | {"OVER_CHOSEN": over_chosen, "SIGMOID": sigmoid}
        balance = scoring | {"BALANCE": True, "COUNTED": True}
        wide = {"weights": "*fp32"} if sigmoid else {}
        found.append(Variant(moe._route_kernel, common | wide, scoring, options))
        found.append(Variant(moe._route_backward_kernel, grads, balance, options))
    return found


def _rows(width: int) -> list[Variant]:
    sizes = moe_rows._columns(width)
    options = {"num_warps": sizes.pop("num_warps")}
    names = ("x", "out", "rows", "weights", "grads", "dact", "act")
    common = {"other": "*i32", "places": "*i32", "dweights": "*fp32", "active": "i32"}
    common |= dict.fromkeys(names, "*bf16")
    return [
        Variant(moe_rows._gather_kernel, common, sizes | {"ACTIVE": 8}, options),
        Variant(moe_rows._combine_kernel, common, sizes | {"ACTIVE": 8, "WEIGHTED": True}, options),
        Variant(moe_rows._combine_kernel, common, sizes | {"ACTIVE": 4, "WEIGHTED": False}, options),
        Variant(moe_rows._weigh_kernel, common, sizes | {"BY_TOKEN": True}, options),
        Variant(moe_rows._weigh_kernel, common, sizes | {"BY_TOKEN": False}, options),
    ]


INVERT = {"order": "*i64", "order_32": "*i32", "places": "*i32", "numel": "i32"}
VARIANTS = [
    *_routing(128, 8, "*bf16"),
    *_routing(32, 4, "*bf16"),
    *_routing(128, 8, "*fp32"),
    *(variant for width in WIDTHS for variant in _rows(width)),
    Variant(moe._invert_kernel, INVERT, {"BLOCK": 1024}, {"num_warps": 4}),
]
