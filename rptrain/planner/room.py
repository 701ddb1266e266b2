"""What this machine has free for a model that answers."""

import logging

import torch

from rptrain.engine.memory.arena import available_bytes
from rptrain.inference.placement import Room
from rptrain.planner.gpus import unusable
from rptrain.planner.hardware import machine

log = logging.getLogger(__name__)


def free_room(training: str = "") -> Room:
    """Free memory, and rates from the card's profile. `training`: the name of a run that trains on this machine.

    Logs a warning if torch cannot use a GPU that is here, unless it is hidden on purpose.
    """
    host, rate = available_bytes(), machine(["cpu:0"]).host_bandwidth
    if not torch.cuda.is_available():
        if (found := unusable()) is None:
            return Room(host, rate, training=training)
        if not found.hidden:
            log.warning("the model runs on the CPU, because %s", found)
        return Room(host, rate, training=training, no_gpu=found.reason)
    here = machine(["cuda:0"])
    return Room(host, rate, here.card.name, torch.cuda.mem_get_info(0)[0], here.card.bandwidth, here.link, training)
