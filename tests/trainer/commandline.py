"""The smallest model that the trainer's tests train, as a command line."""

from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.flags.settings import Settings

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 96 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--make-vocab-size-divisible-by 8 --seq-length 128"
)
# What plans are made of is the same in every run and on every machine.
FIXED = "--distributed-backend gloo"
TRAINING = "--global-batch-size 12 --train-iters 8 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --seed 7"

SMALL = "--num-layers 2 --num-workers 0"
"""For runs whose point is neither how deep a model is nor who packs: a third less to compute."""

NO_COMPILE = {"TORCHDYNAMO_DISABLE": "1"}
"""For the environment of launched jobs: a CPU rank compiles nothing, yet importing torch's compiler is a quarter of its
start. The example under torchrun starts as users do."""


def command_line(*extra: str) -> list[str]:
    """Return the words of a command line that trains; later words of `extra` win over earlier ones."""
    return " ".join((MODEL, TRAINING, FIXED, *extra)).split()


def parsed(flags: str, world_size: int = 4) -> Settings:
    """Return the settings of a run with --dynamic-cp."""
    return parse_args(command_line(f"--dynamic-cp {flags}"), world_size)
