# Two images from one file:
#
#   docker build -t megatron-dynamic-cp:0.1.0 .                      GPUs: NGC's PyTorch and TransformerEngine
#   docker build --target cpu -t megatron-dynamic-cp:0.1.0-cpu .     CPU ranks (gloo), nothing of NVIDIA's
#
# `docker run IMAGE pretrain_gpt.py FLAG...` trains on all GPUs, or on CPU ranks; docs/how-to/operate.md#docker has more.

# The release of NGC on which megatron-core 0.19 is developed, with Python 3.12, and the TransformerEngine it builds there.
ARG NGC=26.06-py3
ARG TE=v2.17.1
ARG PYTHON=3.12.12-slim-bookworm

# The project as a wheel: neither image keeps sources or build tools.
FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY setup.py pyproject.toml README.md ./
COPY dynamic_cp dynamic_cp
COPY megatron megatron
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM python:${PYTHON} AS cpu
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"
COPY docker/constraints.txt /opt/dynamic-cp/docker/
COPY --from=wheel /wheels /wheels
RUN wheel=$(echo /wheels/*.whl) \
 && pip install --no-cache-dir --constraint /opt/dynamic-cp/docker/constraints.txt "${wheel}[train,report]"
WORKDIR /opt/dynamic-cp
COPY LICENSE pretrain_gpt.py ./
COPY examples examples
COPY docker/entrypoint.sh docker/
RUN useradd --create-home --uid 10001 trainer \
 && install -d -o trainer /runs
USER trainer
# Compiles the planner once, into the user's cache folder.
RUN dynamic-cp plan --lengths github --lanes 8 --global-batch-size 64 --max-seqlen 8192 --recompute full
ENV RUN_DIR=/runs/stdlib PYTHON=python3
ENTRYPOINT ["/opt/dynamic-cp/docker/entrypoint.sh"]
CMD ["sh", "examples/train_cpu.sh"]


# TransformerEngine for A100 and H100, without its part for MoE, which is not supported and wants a newer NCCL than NGC has.
FROM nvcr.io/nvidia/pytorch:${NGC} AS transformer-engine
ARG TE
ENV PIP_CONSTRAINT= NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="80;90" NVTE_WITH_NCCL_EP=0
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels \
    "git+https://github.com/NVIDIA/TransformerEngine.git@${TE}"


FROM nvcr.io/nvidia/pytorch:${NGC} AS gpu
ARG TE
# NGC pins its packages in a file that pip reads; torch, numpy and CUDA stay NGC's by installing without dependencies.
ENV PIP_CONSTRAINT=
COPY --from=transformer-engine /wheels /wheels
RUN pip install --no-cache-dir --no-deps --force-reinstall /wheels/transformer_engine*.whl
# Kernels of hybrids; what they need is NGC's. On Hopper its Triton must be 3.7.1 or newer (docs/GPU.md#versions), or a start says so.
RUN pip install --no-cache-dir --no-deps fla-core==0.6.0
COPY docker/constraints.txt /opt/dynamic-cp/docker/
RUN python3 -c "import numpy, torch; print(f'numpy=={numpy.__version__}')" > /tmp/kept.txt \
 && grep -E '^(numba|llvmlite|click|rich|einops|psutil|xxhash|safetensors)==' /opt/dynamic-cp/docker/constraints.txt >> /tmp/kept.txt \
 && pip install --no-cache-dir --constraint /tmp/kept.txt numba click rich einops psutil xxhash safetensors packaging tensorboard \
 && pip install --no-cache-dir --no-deps $(grep '^megatron-core==' /opt/dynamic-cp/docker/constraints.txt)
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/megatron_dynamic_cp*.whl
WORKDIR /opt/dynamic-cp
COPY LICENSE pretrain_gpt.py ./
COPY examples examples
COPY docker/entrypoint.sh docker/
RUN useradd --create-home --uid 10001 trainer \
 && install -d -o trainer /runs
USER trainer
# Fails here rather than on the cluster: versions that do not belong together, an extension that does not load.
RUN python3 -c "import importlib.metadata as m; print({n: m.version(n) for n in ('torch', 'transformer-engine', 'megatron-core')})" \
 && python3 -c "import megatron.core, megatron.trainer.main, megatron.trainer.checkpoints.manifest; from importlib.metadata import version as v; assert v('transformer-engine').startswith('${TE#v}')" \
 && dynamic-cp plan --lengths github --lanes 8 --global-batch-size 64 --max-seqlen 8192 --recompute full
ENV RUN_DIR=/runs
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/opt/dynamic-cp/docker/entrypoint.sh"]
CMD ["dynamic-cp", "doctor"]
