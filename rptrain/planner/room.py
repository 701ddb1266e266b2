"""What this machine has free for a model that answers."""

import torch

from rptrain.engine.store import available_bytes
from rptrain.inference.placement import Room
from rptrain.planner.hardware import machine


def free_room(training: str = "") -> Room:
    """Free memory, and rates from the card's profile. `training`: the name of a run that trains on this machine."""
    host, rate = available_bytes(), machine(["cpu:0"]).host_bandwidth
    if not torch.cuda.is_available():
        return Room(host, rate, training=training)
    here = machine(["cuda:0"])
    return Room(host, rate, here.card.name, torch.cuda.mem_get_info(0)[0], here.card.bandwidth, here.link, training)
