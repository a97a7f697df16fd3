#!/bin/sh
# pretrain_gpt.py FLAG...   one rank per GPU of this container; where there is none, 4 CPU ranks on gloo, and it says so
#                           (RANKS_PER_NODE sets another number)
# anything else             is run as it is: dynamic-cp, python3, bash
set -eu
if [ "${1:-}" = pretrain_gpt.py ]; then
  # Only lines "GPU 0: ...": it says "No devices found." on stdout, too, and lists MIG devices below their GPU.
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)
  ranks=${RANKS_PER_NODE:-$gpus}
  if [ "$ranks" -eq 0 ]; then ranks=4; fi
  case "$gpus $*" in
    0\ *--distributed-backend*) ;;
    0\ *)
      echo "no GPU is visible (docker run --gpus all gives them): training on $ranks CPU ranks, gloo" >&2
      set -- "$@" --distributed-backend gloo
      ;;
  esac
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1
  set -- python3 -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node "$ranks" "$@"
fi
exec "$@"
