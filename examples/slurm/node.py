"""The launcher of one node: `python3 node.py pretrain_gpt.py FLAG...`; srun runs it on each, in the container if any.

SIGUSR1 makes the ranks of the node save and leave, whoever gets it: SLURM signals every process of a step, a container
runtime only the first one, which is this. torchrun must stay until the ranks have left, so it ignores the signal.
SIGTERM does the same; torch before 2.9 cannot be told to ignore it and kills its ranks after 30 s.

Node n of SLURM is node n of the job (static rendezvous): the default would number the nodes by their addresses.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

PASSED_ON = (signal.SIGUSR1, signal.SIGTERM)


def main() -> int:
    """Run torchrun and return its exit code."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # torchrun inherits it; the ranks handle both signals themselves
    get = os.environ
    words = ["--rdzv-backend", "static", "--nnodes", get["SLURM_NNODES"], "--node-rank", get["SLURM_NODEID"]]
    words += ["--nproc-per-node", get["RANKS_PER_NODE"]]
    words += ["--master-addr", get["MASTER_ADDR"], "--master-port", get["MASTER_PORT"]]
    torchrun = subprocess.Popen(
        [get.get("PYTHON", sys.executable), "-m", "torch.distributed.run", *words, *sys.argv[1:]],
        cwd=get["REPO"],
        env={**get, "PET_SIGNALS_TO_HANDLE": "SIGINT,SIGQUIT"},
    )

    def ask_ranks(*_: object) -> None:
        with suppress(psutil.NoSuchProcess):
            for rank in psutil.Process(torchrun.pid).children():
                rank.send_signal(signal.SIGUSR1)

    for number in PASSED_ON:
        signal.signal(number, ask_ranks)
    code = torchrun.wait()
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # or one that comes while Python ends would kill this
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
