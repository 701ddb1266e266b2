"""The types of weights in a GGUF file, and what writes each of them."""

from rptrain.utils.errors import UserError

CONVERTER = ("f32", "f16", "bf16", "q8_0")  # the converter writes these, of models and of adapters
PACKAGE = ("q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")  # the gguf package quantizes to these
QUANTIZE = (  # llama-quantize quantizes to these without measured importances of the weights
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
    *("iq4_nl", "iq4_xs"),
)
ALL = (*CONVERTER, *PACKAGE, *QUANTIZE)
MODEL, ADAPTER = "q8_0", "f32"  # the defaults
EXACT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # and the dtypes in which they are exported
BETWEEN = "bf16"  # what the converter writes for types that it does not know
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}  # per weight
LARGEST = BYTES["q8_0"]  # of all others: some tensors have this type
SUFFIX, MODELFILE = ".gguf", ".Modelfile"  # of a file, and of the Modelfile beside it


def chosen(name: str | None, *, adapter: bool) -> str:
    """The type of this name, in any case; None: the default. UserError if it is unknown, or cannot be an adapter's."""
    kind = (ADAPTER if adapter else MODEL) if name is None else name.lower()
    if kind not in ALL:
        raise UserError(f"unknown type {name!r} of a GGUF file: use one of {', '.join(ALL)}")
    if adapter and kind not in CONVERTER:
        raise UserError(
            f"an adapter cannot be written as {kind}: use one of {', '.join(CONVERTER)}, or --merge to write the model"
        )
    return kind


def needed_bytes(kind: str, weights: int) -> int:
    """The bytes that files of this many weights take while they are written, without the export that they come from."""
    between = 0.0 if kind in CONVERTER else BYTES[BETWEEN]
    return int(weights * (between + BYTES.get(kind, LARGEST)))
