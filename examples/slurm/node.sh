#!/usr/bin/env bash
# node.sh pretrain_gpt.py FLAG...: the launcher of one node. srun runs it once per node, inside the container if any.
#
# SIGUSR1 reaches the ranks of the node, which save and leave. SLURM signals every process of a step, and a container
# runtime only this one: so torchrun, which must stay to the end, ignores it, and the ranks may well get it twice.
set -euo pipefail
cd "$REPO"

# Static rendezvous: node n of SLURM is node n of the job. The default would number nodes by address.
(
  trap '' USR1 TERM
  export PET_SIGNALS_TO_HANDLE=SIGINT,SIGQUIT # torchrun leaves SIGTERM to the ranks (torch >= 2.9; older ones wait 30 s)
  exec "$PYTHON" -m torch.distributed.run --rdzv-backend static --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$RANKS_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
) &
torchrun=$!

# shellcheck disable=SC2317 # the trap calls it
ask_ranks() {
  local ranks
  ranks=$(cat "/proc/$torchrun/task/"*/children 2>/dev/null || true)
  # shellcheck disable=SC2086 # one word per rank
  kill -USR1 $ranks 2>/dev/null || true
}
trap ask_ranks USR1 TERM

while true; do
  code=0
  wait "$torchrun" || code=$?
  if ! kill -0 "$torchrun" 2>/dev/null; then break; fi # else a signal cut the wait short
done
if ((code > 128)); then # the signal's, if torchrun ended in the same moment
  again=0
  wait "$torchrun" || again=$?
  if ((again != 127)); then code=$again; fi
fi
exit "$code"
