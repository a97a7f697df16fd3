"""flash-linear-attention's own programs, run by Triton's interpreter on the CPU: prints how far they are from ours.

`TRITON_INTERPRET=1 python tests/distributed/interpreted_linear_kernels.py`; `test_linear_kernels` runs it in a process
of its own. The interpreter cannot measure, so autotuners take their first choice; it is not for threads.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime import autotuner

from dynamic_cp.types import StateExchange
from megatron.dynamic_cp.attention.linear import kernels, thd
from megatron.dynamic_cp.attention.linear.kernels import FLA
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from tests.distributed.harness import run_ranks
from tests.distributed.test_linear_attention import LAYERS, Whole, error, padded_to


def lane_of_a_pack(whole: Whole, way: StateExchange) -> list[Tensor]:
    padded = padded_to(whole.seqlens, dist.get_world_size())
    params = DynamicPackedSeqParams.build(
        padded, torch.zeros(sum(padded) // dist.get_world_size(), dtype=torch.int64), dist.group.WORLD,
        label="interpreted", stats=ExchangeStats(), state_exchange=way,
    )  # fmt: skip
    thd.choose_linear_kernel = lambda device, sizes: FLA  # type: ignore[assignment]
    return whole.lane(params, dtype=torch.float32)[0]


def main() -> None:
    for kind, key_size, value_size in (("gated_delta_net", 16, 32), ("mamba2", 32, 16)):
        sizes = replace(LAYERS[kind], num_heads=2, num_groups=1, key_size=key_size, value_size=value_size)
        print(kind, "kernel", kernels.check_linear_kernel(FLA, sizes, torch.float32, torch.device("cpu")))
        whole = Whole(sizes, (21, 3))
        for way in thd.WAYS:
            found = whole.joined(run_ranks(2, lane_of_a_pack, whole, way))
            print(kind, way, error(found, whole.expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    autotuner.Autotuner._bench = lambda *_, **__: [1.0, 1.0, 1.0]
    kernels._LENGTHS = (2, 66, 75)
    main()
