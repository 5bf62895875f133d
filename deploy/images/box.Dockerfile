# All services in one image, for `pipelinerl run` on a machine with GPUs (docs/gpus.md). It is built from the repository's root.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates=20* gcc=4:* libc6-dev=2.* libnuma1=2.0.* make=4.* \
        python3-dev=3.* python3-venv=3.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && groupadd --gid 10001 pipelinerl \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/pipelinerl --shell /usr/sbin/nologin pipelinerl \
    && install -d -o 10001 -g 10001 /var/lib/pipelinerl
WORKDIR /opt/pipelinerl
COPY . .
RUN PIP_NO_CACHE_DIR=1 make install DEVICE=cuda
ENV PATH=/opt/pipelinerl/.venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/pipelinerl
WORKDIR /var/lib/pipelinerl
USER 10001:10001
ENTRYPOINT ["tini", "--", "pipelinerl"]
CMD ["run", "gsm8k"]
