"""The host's memory and the engine of a job."""

import torch

from rptrain.engine.engine import Engine, Optimizer
from rptrain.engine.meter import Meter
from rptrain.engine.optim.loss_scale import UNSCALED, LossScale
from rptrain.engine.store import ModelStore
from rptrain.models.weights.file_backed import FileBackedWeights
from rptrain.train.job import Job


def open_store(job: Job) -> ModelStore:
    """The host's memory for the job's model, filled with zeros, and what of it stays in files."""
    mapped = None
    if job.config.model.hold == "map":
        assert job.files is not None
        mapped = FileBackedWeights(job.files, job.spec, job.dtype)
    return ModelStore(
        job.spec,
        job.dtype,
        generations=1 + job.asynchronous,
        wide_grad=job.plan.plan.rounds > 1,
        moments=job.config.optim.moments,
        lock=job.devices[0].startswith("cuda"),
        mapped=mapped,
    )


def open_engine(
    job: Job,
    store: ModelStore,
    *,
    applied: int = 0,
    loss_scale: LossScale | None = None,
    meter: Meter | None = None,
    trace: bool | None = None,
    watched: bool = False,
) -> Engine:
    """The engine that trains as the job's config says; `loss_scale` and `trace` are by default what it says of them."""
    optim = job.config.optim
    return Engine(
        store,
        job.plan.plan,
        job.devices,
        Optimizer(
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.max_grad_norm,
            asynchronous=job.asynchronous,
            threads=job.config.engine.optimizer_threads,
            seed=job.config.train.seed,
        ),
        tokens=job.config.train.sequences * job.config.data.max_length,
        applied=applied,
        loss_scale=loss_scale or starting_scale(job),
        fp16_accumulation=job.config.engine.fp16_accumulation,
        device_limit=job.device_limit,
        trace=job.config.engine.trace if trace is None else trace,
        meter=meter,
        watched=watched,
    )


def starting_scale(job: Job) -> LossScale:
    """The loss scale of new weights."""
    optim = job.config.optim
    return LossScale.start(optim.loss_scale, optim.loss_scale_steps) if job.dtype == torch.float16 else UNSCALED
