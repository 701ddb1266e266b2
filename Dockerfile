# rptrain on NVIDIA GPUs; docs/guide/containers.md says how to use it.
# The base has the CUDA runtime, and the variables that NVIDIA's container toolkit reads. torch brings the other
# libraries of CUDA.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir "build>=1.2,<2"
COPY . /source
RUN /build/bin/python -m build --outdir /wheels /source

FROM ${BASE}
# Triton compiles at run time: it needs a C compiler, and the header files of C and of Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH=torch==2.13.0
RUN python3 -m venv /opt/rptrain && /opt/rptrain/bin/pip install --no-cache-dir "${TORCH}"
COPY --from=build /wheels/*.whl /wheels/
RUN /opt/rptrain/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[tensorboard]"

ARG USER_ID=1000
RUN useradd --non-unique --uid "${USER_ID}" --create-home rptrain \
    && install -d -o rptrain /models /data /work /home/rptrain/.cache
ENV PATH=/opt/rptrain/bin:$PATH HF_HOME=/models HOME=/home/rptrain TRITON_CACHE_DIR=/home/rptrain/.cache/triton
USER ${USER_ID}
WORKDIR /work
VOLUME ["/models", "/data", "/work"]
# GPUs may be lost while a container runs, and a disk may become read-only. Without GPUs there is no nvidia-smi.
HEALTHCHECK --interval=1m --timeout=30s --start-period=1m \
    CMD ["sh", "-c", "test -w /work && if command -v nvidia-smi; then nvidia-smi -L; fi"]
ENTRYPOINT ["rptrain"]
