# shellcheck shell=bash
# What all jobs of this folder share; sourced by each. Set any of these in the environment of sbatch to change it:
#
#   REPO            this repository, or its place in the image   (default: where sbatch was called)
#   PYTHON          interpreter with the packages                (default: python3)
#   RANKS_PER_NODE  ranks on each node                           (default: its GPUs)
#   RUN_DIR         checkpoints and TensorBoard                  (default: runs/<job name>)
#   RESEND_S        seconds between two requests to stop         (default: 10)
#   MAX_RESTARTS    requeues by `requeue_if_stopped` at most     (default: 100)
set -euo pipefail

export REPO=${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}
export PYTHON=${PYTHON:-python3}
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME}
if [[ $RUN_DIR != /* ]]; then RUN_DIR=$PWD/$RUN_DIR; fi # containers are given it under the same name
export RUN_DIR

# Node 0 of SLURM's list is the rendezvous. A port of its own for each job that shares the node.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # `| head` may kill scontrol by SIGPIPE
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One queue per device, so that a transfer starts before the kernels it should overlap with. The trainer refuses others.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# srun does not take this over from sbatch by itself (since SLURM 22.05).
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# Of your site; NCCL finds both by itself on most. The socket is for bootstrapping, IB_HCA for the data.
# export NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=bond0 GLOO_SOCKET_IFNAME=bond0
# Many CP groups are many communicators, and NVLS reserves memory for each; set it to 1 where memory is not short.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# Words between srun and the command (a container runtime), and more options of srun. Jobs fill them.
CONTAINER=()
SRUN_OPTIONS=()

STOP_ASKED=0

# launch pretrain_gpt.py FLAG...: run it on all ranks and return its exit code.
#
# Block distribution and one launcher per node give node n the ranks n * RANKS_PER_NODE and following, in SLURM's order
# of nodes, which is that of the network's switches: lanes next to each other share a node, as CP groups need it.
# USR1 or TERM to this shell becomes USR1 to the ranks: they finish the iteration, save, and leave with 0. A TERM while
# they do is remembered: scancel, or a preemption, in the middle of a save before the time limit.
launch() {
  trap 'if [[ $STOP_ASKED != TERM ]]; then STOP_ASKED=USR1; fi' USR1
  trap 'STOP_ASKED=TERM' TERM
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --distribution=block --kill-on-bad-exit=1 --unbuffered \
    "${SRUN_OPTIONS[@]}" "${CONTAINER[@]}" "$PYTHON" "$REPO/examples/slurm/node.py" "$@" &
  local step=$! asking code=0
  wait "$step" || code=$?
  if [[ $STOP_ASKED != 0 ]]; then # that cut the wait short
    echo "SIG$STOP_ASKED: asking the ranks to save and leave"
    # Again and again: ranks that are still starting do not listen yet.
    {
      trap '' USR1 TERM
      while kill -USR1 "$step"; do sleep "${RESEND_S:-10}"; done
    } >/dev/null 2>&1 &
    asking=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done # each signal cuts it short again
    code=0
    wait "$step" || code=$?
    kill -KILL "$asking" 2>/dev/null || true
    wait "$asking" 2>/dev/null || true # or bash writes that it was killed
  fi
  trap - USR1 TERM
  return "$code"
}

# was_preempted: whether another job takes this one's nodes. SLURM then sends SIGTERM to the ranks, not to this shell:
# they save and leave with 0, which SLURM takes for the end of the job, and does not requeue.
was_preempted() { [[ $(scontrol show job "$SLURM_JOB_ID") =~ \ PreemptTime=[0-9] ]]; }

# requeue_if_stopped CODE: put this job back into the queue when it was made to save and leave, by SIGUSR1 or by a
# preemption; end it with CODE else. scancel must not come back.
requeue_if_stopped() {
  local restarts=${SLURM_RESTART_COUNT:-0}
  if [[ $STOP_ASKED == USR1 ]] || { (($1 == 0)) && was_preempted; }; then
    # Not 0: nothing was saved, the job would resume from before and fail again. 138: USR1 met srun while it was ending.
    if (($1 != 0 && $1 != 138)); then
      echo "left with $1: not requeueing $SLURM_JOB_ID" >&2
    elif ((restarts < ${MAX_RESTARTS:-100})); then
      echo "left with $1, requeueing $SLURM_JOB_ID (restart $((restarts + 1)))"
      scontrol requeue "$SLURM_JOB_ID"
      exit 0
    else
      echo "left with $1, $restarts restarts reach MAX_RESTARTS: not requeueing $SLURM_JOB_ID" >&2
    fi
  fi
  exit "$1"
}
