"""Files that start a setting: the flags of pretrain_gpt.py, or a SLURM job with them.

    job.flags     torchrun ... pretrain_gpt.py @job.flags --mock-data --lr 1e-5 --train-iters 100
    job.sbatch    sbatch job.sbatch, from the root of the repository

A file has the model, the layout and the plan's limits. What is the user's own comes behind: data, tokenizer, learning
rate, length of the run. `examples/slurm/model.sh` brings defaults of these for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.flags import nodes_of

SUFFIXES = (".flags", ".sbatch")
RUN = "--mock-data --tokenizer-type NullTokenizer --eod-id 0 --lr 1e-5 --train-iters 100"
"""Flags with which a file of flags starts on made-up samples."""

_JOB = """#!/usr/bin/env bash
{about}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
source "${{SLURM_SUBMIT_DIR:?submit with sbatch, from the root of the repository}}/examples/slurm/common.sh"
JOB_FLAGS=(
  {flags}
)
source "$SLURM_SUBMIT_DIR/examples/slurm/model.sh" # data, learning rate, length of the run and checkpoints

launch pretrain_gpt.py "${{FLAGS[@]}}" "$@"
"""


def job_file(path: str, flags: Sequence[str], setting: Setting, about: Sequence[str]) -> str:
    """Return the text of the file that starts `setting`: a SLURM job if `path` ends in .sbatch, else flags.

    Args:
        flags: lines of flags, quoted as in a shell.
        about: lines that say what the job is; comments of the file.
    """
    comments = "\n".join(f"# {line}" for line in about)
    if Path(path).suffix.lower() != ".sbatch":
        return "\n".join([comments, *flags, ""])
    nodes, per_node = nodes_of(setting)
    name = Path(path).stem
    return _JOB.format(about=comments, name=name, nodes=nodes, per_node=per_node, flags="\n  ".join(flags))


def beside(path: str, name: str) -> str:
    """Return where another file of the job goes: job-static.flags beside job.flags; name: with its suffix or without.

    Args:
        name: what the file is, such as "static" or "hardware.json".
    """
    place = Path(path)
    return str(place.with_name(f"{place.stem}-{name}{'' if Path(name).suffix else place.suffix}"))
