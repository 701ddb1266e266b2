"""Check of the programs that write GGUF files, which only exports to that format need."""

from rptrain.doctor.checks import Check, check
from rptrain.gguf.tools import GET, INSTALL, PACKAGE, QUANTIZE, find, has_package, misplaced


def examine() -> Check:
    """A warning if LLAMA_CPP_DIR is set to something else; without it, what exports to GGUF files need is optional."""
    tools = find()
    figures = {
        "converter": None if tools.models is None else str(tools.models),
        "quantizer": None if tools.quantize is None else str(tools.quantize),
        "package": has_package(),
    }
    if (wrong := misplaced(tools)) is not None:
        return check("GGUF", wrong, f"get one with: {GET}", **figures)
    if tools.models is None:
        return check("GGUF", f"llama.cpp's converter is not found; exports to GGUF files need it: {GET}", **figures)
    text = f"{tools.models}, " + (f"no {QUANTIZE}" if tools.quantize is None else str(tools.quantize))
    if not figures["package"]:
        text += f"; the package {PACKAGE} is not installed; exports to GGUF files need it: {INSTALL}"
    return check("GGUF", text, **figures)
