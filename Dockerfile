# trahiv in a container. Runs, identities and downloaded models are kept in the volume /data.
#
# CUDA:  docker build -t trahiv .
# CPU:   docker build -t trahiv --build-arg TORCH_INDEX=ADDRESS .
#        ADDRESS is PyTorch's CPU wheel index (pytorch.org/get-started), or that of another CUDA.
# run:   docker run --init --gpus all --shm-size 8g --network host -v trahiv:/data trahiv init quickstart
#        (without --gpus all on a CPU; a terminal's colours and questions need -it)
# stop:  docker stop -t 60 CONTAINER
#
# docs/running.md, "A container", says what the options are for; compose.yaml has two peers.

# A Debian with Python 3.11-3.13 and its module venv. PyTorch brings CUDA's libraries itself.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# The user's home is the volume: what libraries cache in a home outlives the container.
RUN useradd --uid 1000 --home-dir /data trahiv \
    && install --directory --owner trahiv --group trahiv /data \
    && python3 -m venv /opt/trahiv
ENV PATH=/opt/trahiv/bin:$PATH PYTHONUNBUFFERED=1

# PyTorch, what else trahiv needs, and trahiv: three layers, and the last, which changes most often, is small.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
WORKDIR /src
COPY pyproject.toml .
RUN python -c 'import tomllib; p = tomllib.load(open(0, "rb"))["project"]; \
        print(*p["dependencies"], *p["optional-dependencies"]["web"], sep="\n")' \
        < pyproject.toml > requirements.txt \
    && pip install --no-cache-dir -r requirements.txt
COPY README.md LICENSE ./
COPY configs configs
COPY docs docs
COPY trahiv_cli trahiv_cli
RUN pip install --no-cache-dir --no-deps .

USER trahiv
WORKDIR /data
VOLUME /data
ENTRYPOINT ["trahiv"]
CMD ["--help"]
