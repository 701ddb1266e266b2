"""What servers of models need for an exported adapter, without torch. docs/guide/serving.md says what was tried."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rptrain.checkpoint.export_progress import ADAPTER_CONFIG
from rptrain.utils.files import read_small_text

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's max_lora_rank
EXPERTS = ("gate_up_proj", "down_proj")  # vLLM takes adapters of experts only of both together
PAGE = "docs/guide/serving.md"


@dataclass(frozen=True)
class Serving:
    """How vLLM serves an adapter. Each field has the name of vLLM's option, except `refused`: the parts of the adapter
    that it does not load, so that only the merged model can be served.

    `max_lora_rank` is the smallest value that the adapter's rank fits in; for adapters of experts, too, it is compared
    with the rank of one expert, although their tensors have the ranks of all experts in one dimension.
    """

    max_lora_rank: int | None  # None: the rank is above all values
    enable_mixed_moe_lora_format: bool  # for adapters of experts, as is_3d_lora_weight is
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def note(self) -> str:
        """What to do if the adapter needs more than an ordinary one; else empty."""
        if self.refused:
            what = " and ".join(self.refused)
            return f"vLLM does not load {what}: to serve the model, export it with --merge ({PAGE})"
        if self.enable_mixed_moe_lora_format:
            return (
                "It has adapters of experts. To serve it with vLLM, use --enable-mixed-moe-lora-format, "
                f'--max-lora-rank {self.max_lora_rank} and "is_3d_lora_weight": true in --lora-modules; '
                f"for other servers, export the model with --merge ({PAGE})"
            )
        return ""


def serving(directory: Path) -> Serving | None:
    """How vLLM serves an export. None if it is a whole model, which needs nothing."""
    file = directory / ADAPTER_CONFIG
    if not file.is_file():
        return None
    config = json.loads(read_small_text(file))
    names = [name.rpartition(".")[2] for name in config["target_parameters"] or ()]
    adapted = [name for name in EXPERTS if name in names]
    rank = next((rank for rank in RANKS if config["r"] <= rank), None)
    found = {
        "DoRA": config["use_dora"],
        "modules that are trained in full": config["modules_to_save"],
        f"adapters of experts without one of {' and '.join(EXPERTS)}": len(adapted) == 1,
        f"ranks above {RANKS[-1]}": rank is None,
    }
    return Serving(rank, bool(adapted), tuple(name for name, has in found.items() if has))
