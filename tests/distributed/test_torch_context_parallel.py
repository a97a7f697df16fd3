"""torch's own `context_parallel` on documents of equal length trains what one process does; ours does so elsewhere."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.types import Sample
from examples.torch_device_mesh import Document
from megatron.integrations.outside import sum_of_losses
from tests.distributed.outside import Step, assert_steps_equal, gradients_of, run_without_shims, steps_alone
from tests.distributed.test_outside_torch import NUM_STEPS, new_model

DOCUMENTS = [Document(Sample(sample_id=index, seqlen=256)) for index in range(8)]


def let_context_parallel_run_on_cpu():
    """Give torch's context parallelism what it lacks on CPU: the name of the CPU kernel. The rest is torch's own."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def ring(function, num_outputs, is_causal, mesh, *arguments, **keywords):
        options = {"is_causal": is_causal, "dropout_p": 0.0, **{k: v for k, v in keywords.items() if k == "scale"}}
        found = function(mesh.get_group(), 2, *arguments, **options)[:num_outputs]
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)

    def forward(_, args, keywords):
        local = [x.to_local() for x in args[:3]]
        return ring(torch_cp._templated_ring_attention, 2, args[4], args[0].device_mesh, kernel, *local, **keywords)

    def backward(_, args, keywords):
        grad, *local = [x.to_local() for x in args[:6]]
        function, arguments = torch_cp._templated_ring_attention_backward, (backward_kernel, grad, "grad_out", *local)
        return ring(function, 3, args[7], args[1].device_mesh, *arguments, **keywords)

    torch_cp.custom_ops[kernel.default] = forward
    torch_cp.custom_ops[backward_kernel.default] = backward


def rows_of(documents):
    """Tokens, labels, positions and loss mask of documents of equal length, each [documents, S]."""
    columns = [(one.tokens, one.labels, np.arange(len(one.tokens)), one.loss_mask) for one in documents]
    return [torch.from_numpy(np.stack(column)) for column in zip(*columns, strict=True)]


def share_of(model, rows, num_tokens):
    tokens, labels, positions, mask = rows
    return sum_of_losses(model(tokens, labels, positions), mask) / num_tokens


def num_tokens_of(rows):
    return int(rows[3].sum())


def train(rotation):
    """Return steps alone, and with torch's context_parallel on 2 x 2 ranks."""
    let_context_parallel_run_on_cpu()
    set_rotate_method(rotation)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    alone = steps_alone(new_model()[0], [[rows_of(DOCUMENTS)]] * NUM_STEPS, num_tokens_of, share_of)
    model, optimizer = new_model()
    wrapped, steps = DistributedDataParallel(model), []
    for _ in range(NUM_STEPS):
        rows, num_tokens = rows_of(DOCUMENTS[mesh["dp"].get_local_rank() :: 2]), alone[0].num_tokens
        with context_parallel(mesh["cp"], buffers=rows, buffer_seq_dims=[1] * 4):
            assert rows[0].shape == (4, 128)
            share = share_of(wrapped, rows, num_tokens)
            (4 * share).backward()
        loss = share.detach()
        dist.all_reduce(loss)
        steps.append(Step(loss.item(), num_tokens, gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return steps, alone


@pytest.mark.nightly
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_equal_documents_train_as_in_one_process(rotation):
    for steps, alone in run_without_shims(4, train, rotation):
        assert len({step.loss for step in alone}) == NUM_STEPS
        assert_steps_equal(steps, alone)
