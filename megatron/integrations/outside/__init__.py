"""Planned micro-batches in loops of plain PyTorch, and of Hugging Face accelerate; needs torch, not megatron-core.

    lanes = Lanes.build(mesh, problem)                         # CP groups over all ranks of a DeviceMesh
    step = lanes.step(samples, read_sample)                    # plan, pack, pad, shard: this lane's part
    result = train_step(lanes, model, step, loss_sum)          # forward, backward, one mean per token of the whole job

The model is wrapped in DistributedDataParallel or `fully_shard` over `lanes.mesh`. It calls
`scaled_dot_product_attention(..., packed_seq_params=...)` in the place of torch's, and takes RoPE at the micro-batch's
`position_ids`. torch's own `context_parallel` is refused: it cuts every tensor at one degree and knows no documents.

Read in this order: `lanes`, `step` (attention, and a step of micro-batches), `collator` (rows of data sets), `models`
(what is done to a transformers model), `hugging_face` (imports transformers and accelerate when called), `trainer` (for
transformers' and TRL's own loops). The names of the first three are here.
"""

from megatron.integrations.outside.collator import IGNORED, Document, PlannedCollator, documents_of
from megatron.integrations.outside.lanes import Lanes, LaneStep
from megatron.integrations.outside.step import StepResult, scaled_dot_product_attention, sum_of_losses, train_step

__all__ = [
    "IGNORED",
    "Document",
    "LaneStep",
    "Lanes",
    "PlannedCollator",
    "StepResult",
    "documents_of",
    "scaled_dot_product_attention",
    "sum_of_losses",
    "train_step",
]
