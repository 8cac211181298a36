# syntax=docker/dockerfile:1
# The container of `make kubernetes`: its entry point is the same command that people type.
#   docker build -t registry.example/sft-play:0.2.0 .
#   docker run --gpus all --shm-size=16g -v "$PWD/runs:/runs" -v "$PWD/models:/models" registry.example/sft-play:0.2.0 \
#       train-distributed CONFIG=configs/l40s_pair.yaml RUN_NAME=demo
# Checked by rules (tests/unit/test_kubernetes_image.py), never built by us: no engine was at hand (docs/kubernetes.md).
# The tag names one patch release. A digest pins the bytes: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 DS_BUILD_OPS=0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.2.0-* g++=4:12.2.0-* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
# The packages first: they change seldom, and are then taken from the cache. torch comes first and alone, since DeepSpeed's build looks at
# the torch that is there; its wheels bring CUDA's libraries.
COPY constraints.txt ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --constraint constraints.txt torch
COPY pyproject.toml LICENSE README.md ./
COPY sft_play ./sft_play
# Editable, at the same path in both stages: presets (`extends: l40s_pair`) are found next to the package.
RUN /opt/venv/bin/pip install --constraint constraints.txt --editable .
# Trackers in addition to TensorBoard, without our constraints: Aim wants older versions of filelock and python-dateutil.
ARG TRACKERS=""
RUN case "$TRACKERS" in \
        "") ;; \
        *==*) /opt/venv/bin/pip install "$TRACKERS" ;; \
        *) echo "TRACKERS needs a version: name==version" >&2; exit 1 ;; \
    esac

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="SFT-Play" \
      org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# gcc: Triton and DeepSpeed compile small pieces at run time. The rest: InfiniBand for NCCL, which loads it where there is an adapter.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc=4:12.2.0-* g++=4:12.2.0-* libc6-dev=2.36-* ibverbs-providers=44.0-* libibverbs1=44.0-* librdmacm1=44.0-* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 sft \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin sft \
    && mkdir /models /runs /tracking /config \
    && chown sft:sft /models /runs /tracking
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY constraints.txt pyproject.toml ./
COPY sft_play ./sft_play
COPY configs ./configs
COPY examples ./examples
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RUNS_DIR=/runs \
    SFT_PLAY_CACHE=/models/cache \
    HF_HOME=/models/huggingface
USER 1000:1000
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "sft_play.schedulers.entry"]
CMD ["help"]
