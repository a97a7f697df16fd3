#!/bin/sh
# pretrain_gpt.py FLAG...   one rank per GPU of this container, or 4 CPU ranks where there is none (RANKS_PER_NODE)
# anything else             is run as it is: dynamic-cp, python3, bash
set -eu
if [ "${1:-}" = pretrain_gpt.py ]; then
  ranks=${RANKS_PER_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
  if [ "$ranks" -eq 0 ]; then ranks=4; fi
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1
  set -- python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
fi
exec "$@"
