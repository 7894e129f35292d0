# trahiv in a container; runs, identities and downloaded models live in the volume /data.
#
# CUDA:  docker build -t trahiv .
# CPU:   docker build -t trahiv:cpu --build-arg BASE=python:3.12-slim --build-arg TORCH_INDEX=<address> .
#        <address> is PyTorch's CPU wheel index (pytorch.org/get-started); without it the image carries CUDA for nothing.
# run:   docker run --gpus all --shm-size=8g -v trahiv:/data -p 31337:31337/tcp -p 31337:31337/udp trahiv \
#            init quickstart --host-maddr /ip4/0.0.0.0/tcp/31337 --host-maddr /ip4/0.0.0.0/udp/31337/quic-v1
#        (without --gpus all on a CPU; a terminal's colours and questions need -it)
# stop:  docker stop -t 60: time for the last checkpoint and the goodbye.
#
# --shm-size: peers keep what they average in shared memory, about five times the trained parameters in float32;
# Docker's default of 64 MB ends in "unable to allocate shared memory". --ipc=host does as well.
#
# BASE is any Debian or Ubuntu whose Python, there or from apt, is 3.11-3.13. PyTorch brings CUDA libraries of its own,
# those of CUDA 13, which need an NVIDIA driver of 580 or newer; for an older one, TORCH_INDEX can name PyTorch's index
# for another CUDA, if that has this version. No compiler is left inside, so `torch_compile: true` does not work here.
ARG BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04

FROM ${BASE} AS base
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*)

FROM base AS build
RUN python3 -c 'import ensurepip, venv' 2>/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3-venv)
RUN python3 -m venv /opt/trahiv && /opt/trahiv/bin/pip install --no-cache-dir --upgrade 'pip>=25'
ARG TORCH_INDEX=
RUN /opt/trahiv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
WORKDIR /src
# What trahiv needs changes seldom, trahiv itself often: two layers.
COPY pyproject.toml .
RUN /opt/trahiv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && /opt/trahiv/bin/pip install --no-cache-dir -r requirements.txt
COPY README.md LICENSE ./
COPY configs configs
COPY docs docs
COPY trahiv_cli trahiv_cli
RUN /opt/trahiv/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM base
# Ubuntu's images come with a user 1000 of their own.
RUN if getent passwd 1000 >/dev/null; then userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; fi \
    && useradd --create-home --uid 1000 trahiv \
    && install -d -o trahiv -g trahiv /data
COPY --from=build /opt/trahiv /opt/trahiv
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    /opt/trahiv/bin/pip install --no-cache-dir --no-deps /dist/*.whl
ENV PATH=/opt/trahiv/bin:$PATH \
    HF_HOME=/data/hf \
    PYTHONUNBUFFERED=1
USER trahiv
WORKDIR /data
VOLUME /data
EXPOSE 31337/tcp 31337/udp
ENTRYPOINT ["trahiv"]
CMD ["--help"]
