# zerofit with the tested set of constraints.txt (make image; docs/install.md#containers).
# NVIDIA driver >=580 for the target `cuda`: the CUDA 13 runtime is in PyTorch's wheels, so the base image has none.
# For a fused CPU optimizer (--offload) and Triton's kernels the image holds a C++ compiler, but no nvcc.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 zerofit \
    && install --directory --owner zerofit /workspace /opt/zerofit /opt/venv
USER 1000
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
# The packages of the set change less often than the project: their layer stays while only the project changes.
COPY --chown=zerofit pyproject.toml setup.py constraints.txt README.md LICENSE Makefile /opt/zerofit/
COPY --chown=zerofit src/zerofit/__init__.py /opt/zerofit/src/zerofit/
COPY --chown=zerofit src/zerofit/launch/make_variables.py /opt/zerofit/src/zerofit/launch/

# TORCH_INDEX: the index of PyTorch's CPU wheels (pytorch.org names it); without it CUDA's libraries come along, unused.
FROM base AS cpu
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint /opt/zerofit/constraints.txt torch \
    && PIP_CONSTRAINT=/opt/zerofit/constraints.txt make -C /opt/zerofit install ENV=active PYTHON=python
COPY --chown=zerofit . /opt/zerofit
WORKDIR /workspace
ENTRYPOINT ["zerofit"]
CMD ["doctor"]

FROM base AS cuda
RUN PIP_CONSTRAINT=/opt/zerofit/constraints.txt make -C /opt/zerofit install ENV=active PYTHON=python
COPY --chown=zerofit . /opt/zerofit
WORKDIR /workspace
ENTRYPOINT ["zerofit"]
CMD ["doctor"]
