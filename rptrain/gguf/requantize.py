"""Quantize the weights of a GGUF file with the gguf package, in a process of its own.

python -P -m rptrain.gguf.requantize SOURCE TARGET TYPE. Weights are the tensors that the converter stored in 16 bits:
it keeps those that must not be quantized, such as norms and routers, in float32. Embedding and head get 8 bits.
"""

import sys
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ENDS = ("token_embd.weight", "output.weight")
FILE_TYPES = {"mxfp4": "MOSTLY_MXFP4_MOE"}  # those whose name does not follow from the type's


def requantize(source: Path, target: Path, kind: str) -> None:
    """Writes a copy of a GGUF file with its weights quantized, one tensor in memory at a time."""
    import numpy as np

    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(source)
    architecture, file_type = gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE
    writer = gguf.GGUFWriter(target, reader.fields[architecture].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in (architecture, file_type):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")])
    types = [_type_of(gguf, tensor, kind) for tensor in reader.tensors]
    for tensor, new in zip(reader.tensors, types, strict=True):
        shape, dtype = tensor.data.shape, tensor.data.dtype
        if new != tensor.tensor_type:
            dtype = np.dtype("uint8")
            shape = gguf.quant_shape_to_byte_shape([int(size) for size in reversed(tensor.shape)], new)
        writer.add_tensor_info(tensor.name, shape, dtype, prod(shape) * dtype.itemsize, new)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, new in zip(reader.tensors, types, strict=True):
        writer.write_tensor_data(_quantized(gguf, tensor, new))
    writer.close()


def _type_of(gguf: Any, tensor: Any, kind: str) -> Any:
    """The type of a tensor in the copy. Rows that are not whole blocks stay as they are."""
    types = gguf.GGMLQuantizationType
    if tensor.tensor_type not in (types.F16, types.BF16):
        return tensor.tensor_type
    new = types.Q8_0 if tensor.name in ENDS else types[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[new]
    return tensor.tensor_type if int(tensor.shape[0]) % block else new


def _quantized(gguf: Any, tensor: Any, new: Any) -> "np.ndarray[Any, Any]":
    if new == tensor.tensor_type:
        return tensor.data
    return gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), new)


if __name__ == "__main__":
    requantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
