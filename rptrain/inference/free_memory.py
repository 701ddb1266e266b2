"""What this machine has free for a model that answers."""

import logging

import torch

from rptrain.inference.placement import FreeMemory
from rptrain.machine.gpus import unusable
from rptrain.machine.hardware import machine
from rptrain.utils.host_memory import available_bytes

log = logging.getLogger(__name__)


def free_memory(training: str = "") -> FreeMemory:
    """Free memory, and rates from the card's profile. `training`: the name of a run that trains on this machine.

    Logs a warning if torch cannot use a GPU that is here, unless it is hidden on purpose.
    """
    host, rate = available_bytes(), machine(["cpu:0"]).host_bandwidth
    if not torch.cuda.is_available():
        if (found := unusable()) is None:
            return FreeMemory(host, rate, training=training)
        if not found.hidden:
            log.warning("the model runs on the CPU, because %s", found)
        return FreeMemory(host, rate, training=training, no_gpu=found.reason)
    here = machine(["cuda:0"])
    return FreeMemory(
        host, rate, here.card.name, torch.cuda.mem_get_info(0)[0], here.card.bandwidth, here.link, training
    )
