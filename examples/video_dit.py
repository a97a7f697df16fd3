"""How do I train a video diffusion transformer with planned micro-batches?

torchrun --local-addr localhost --nproc-per-node 4 examples/video_dit.py

A small DiT (patches, rotary positions in time, height and width, adaLN by time and class, flow matching) on 4 CPU ranks
(gloo): images and clips of many resolutions in one batch, attention within each over its own number of ranks. Latents
are synthetic; their shapes are those of real ones with an eighth of the height and width. Trained from plans, at static
CP 4, and alone on rank 0, one clip at a time. Megatron is not needed.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp import ModelShape, PlanOptions, Sample, Topology, load_hardware
from dynamic_cp.types import Problem
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.integrations.outside import Lanes, StepResult, scaled_dot_product_attention, sum_of_losses, train_step

LATENT_CHANNELS, PATCH = 4, 2
PATCH_SIZE = LATENT_CHANNELS * PATCH * PATCH
HIDDEN, LAYERS, HEADS, HEAD_DIM, NUM_CLASSES = 96, 2, 4, 24, 8
MODEL = ModelShape(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=HEADS,
    kv_channels=HEAD_DIM,
    vocab_size=1,
    causal_attention=False,
)
BATCH_SIZE, NUM_STEPS = 24, 4
SHRINK = 8
"""Height and width of the videos over those of what is trained here."""


class Video(NamedTuple):
    """Frames and pixels of an image or a clip, and its share of the data."""

    frames: int
    height: int
    width: int
    share: float

    def grid(self, shrink: int = 1) -> tuple[int, int, int]:
        """Return its patches in time, height and width: after a VAE of 4 x 8 x 8, in patches of 1 x 2 x 2."""
        patches = (-(-pixels // (8 * PATCH * shrink)) for pixels in (self.height, self.width))
        return ((self.frames - 1) // 4 + 1, *patches)


VIDEOS = (
    Video(1, 256, 256, 0.15),  #       256 tokens,    4 here
    Video(1, 512, 512, 0.15),  #     1 024 tokens,   16 here
    Video(1, 1024, 1024, 0.10),  #   4 096 tokens,   64 here
    Video(17, 256, 448, 0.20),  #    2 240 tokens,   40 here
    Video(65, 256, 448, 0.10),  #    7 616 tokens,  136 here
    Video(129, 256, 448, 0.05),  #  14 784 tokens,  264 here
    Video(33, 480, 848, 0.10),  #   14 310 tokens,  252 here
    Video(81, 480, 848, 0.06),  #   33 390 tokens,  588 here
    Video(129, 480, 848, 0.04),  #  52 470 tokens,  924 here
    Video(49, 720, 1280, 0.03),  #  46 800 tokens,  780 here
    Video(129, 720, 1280, 0.02),  # 118 800 tokens, 1980 here
)


class Clip:
    """A clip of a step, made from its number alone: latents that follow its class, noise and time of flow matching."""

    def __init__(self, sample_id: int, video: Video) -> None:
        random = np.random.default_rng(sample_id)
        self.label = int(random.integers(NUM_CLASSES))
        self.time = float(1 / (1 + np.exp(-random.normal())))
        grid = np.indices(video.grid(SHRINK)).reshape(3, -1).T
        self.places = torch.from_numpy(grid.astype(np.float32))
        frames, height, width = video.grid(SHRINK)
        t, y, x = np.indices((frames, PATCH * height, PATCH * width)) * np.array([0.2, 0.3, 0.4]).reshape(3, 1, 1, 1)
        waves = [np.sin((channel + 1) * (t + y + x) / 2 + self.label) for channel in range(LATENT_CHANNELS)]
        self.patches = patchify(torch.from_numpy(np.stack(waves).astype(np.float32)))
        self.noise = torch.from_numpy(random.standard_normal(self.patches.shape).astype(np.float32))


def patchify(latents_CFHW: Tensor) -> Tensor:
    """Return the patches of 1 x 2 x 2, [tokens, PATCH_SIZE]."""
    patches = latents_CFHW.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # C F H p W q
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, PATCH_SIZE)


class Rows:
    """What a rank has read of a step. Packed tokens are numbers of its rows, and labels numbers of its clips.

    Row 0 and clip 0 are those of padding.
    """

    def __init__(self) -> None:
        self._parts = [(torch.zeros(1, PATCH_SIZE), torch.zeros(1, PATCH_SIZE), torch.zeros(1, 3))]
        self._conditions = [(0.0, 0)]
        self._num_rows = 1

    def read(self, clip: Clip) -> SampleTokens:
        """Take in a clip and return what stands for its patches; all have a loss."""
        num_tokens = len(clip.patches)
        rows = np.arange(self._num_rows, self._num_rows + num_tokens)
        labels = np.full(num_tokens, len(self._conditions))
        self._parts.append((clip.patches, clip.noise, clip.places))
        self._conditions.append((clip.time, clip.label))
        self._num_rows += num_tokens
        return SampleTokens(tokens=rows, labels=labels, loss_mask=np.ones(num_tokens, np.float32))

    def tensors(self) -> list[Tensor]:
        """Return patches, noise and places of each row, and time and class of each clip."""
        times, labels = zip(*self._conditions, strict=True)
        rows = [torch.cat(parts) for parts in zip(*self._parts, strict=True)]
        return [*rows, torch.tensor(times), torch.tensor(labels)]


def rotate(x_BHTD: Tensor, places_T3: Tensor) -> Tensor:
    """Return x with RoPE by time, height and width, a third of the channels each."""
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM // 3, 2) / (HEAD_DIM // 3))
    angles = (places_T3[:, :, None] * frequencies).flatten(1)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the clip's time and class (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.modulation = nn.Linear(HIDDEN, 6 * HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_TC: Tensor, places_T3: Tensor, condition_NC: Tensor, clip_T: Tensor, params: object) -> Tensor:
        """Return the block's output [T, HIDDEN]."""
        modulation = self.modulation(F.silu(condition_NC))[clip_T].chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        qkv_BHTD = self.qkv(self.norm(x_TC) * (1 + scale) + shift).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)[None]
        query, key, value = qkv_BHTD.chunk(3, dim=1)
        query, key = rotate(query, places_T3), rotate(key, places_T3)
        if params is None:
            context = F.scaled_dot_product_attention(query, key, value)
        else:
            context = scaled_dot_product_attention(query, key, value, is_causal=False, packed_seq_params=params)
        x_TC = x_TC + gate * self.out(context[0].transpose(0, 1).flatten(1))
        hidden = self.up(self.norm(x_TC) * (1 + mlp_scale) + mlp_shift)
        return x_TC + mlp_gate * self.down(F.gelu(hidden, approximate="tanh"))


class VideoDiT(nn.Module):
    """Returns the velocity of each patch, [T, PATCH_SIZE]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.velocity = nn.Linear(PATCH_SIZE, HIDDEN), nn.Linear(HIDDEN, PATCH_SIZE)
        self.time = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.classes = nn.Embedding(NUM_CLASSES, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(
        self, x_TP: Tensor, places_T3: Tensor, time_N: Tensor, label_N: Tensor, clip_T: Tensor, params: object = None
    ) -> Tensor:
        """Return velocities; `clip_T` says which of the N clips a token belongs to."""
        angles = 1000 * time_N[:, None] * 10_000.0 ** (-torch.arange(HIDDEN // 2) / (HIDDEN // 2))
        condition = self.time(torch.cat((angles.cos(), angles.sin()), -1)) + self.classes(label_N)
        x_TC = self.patches(x_TP)
        for block in self.blocks:
            x_TC = block(x_TC, places_T3, condition, clip_T, params)
        return self.velocity(self.norm(x_TC))


def loss_sum(tensors: list[Tensor], model: nn.Module, batch: dict) -> Tensor:
    """Return the sum of the losses of a micro-batch's patches: squared error of the velocity from data to noise."""
    row_T, clip_T = batch["tokens"][0], batch["labels"][0]
    data, noise, places = (rows[row_T] for rows in tensors[:3])
    time_N, label_N = tensors[3:]
    share_T1 = time_N[clip_T, None]
    noisy = (1 - share_T1) * data + share_T1 * noise
    velocity = model(noisy, places, time_N, label_N, clip_T, batch.get("packed_seq_params"))
    return sum_of_losses((velocity - (noise - data)).square().mean(-1)[None], batch["loss_mask"])


def videos_of(step: int) -> dict[int, Video]:
    """Return the clips of a global batch by their number."""
    drawn = np.random.default_rng(step).choice(len(VIDEOS), BATCH_SIZE, p=[video.share for video in VIDEOS])
    return {1000 * step + i: VIDEOS[k] for i, k in enumerate(drawn)}


def problem_for(num_lanes: int, *exchanges: str) -> Problem:
    """Return what is planned for: so few tokens on a rank that the largest clip needs the largest CP size."""
    topology = Topology(num_lanes=num_lanes)
    options = PlanOptions(max_tokens_per_rank=2048 // topology.max_cp_size, cp_comm_types=exchanges or ("p2p", "a2a"))
    return Problem(topology=topology, model=MODEL, hardware=load_hardware("cpu"), options=options)


def step_planned(lanes: Lanes, model: nn.Module, index: int) -> tuple[StepResult, Mapping[int, int]]:
    """Take forward and backward of a global batch from its plan; return the result, and CP size -> number of packs."""
    videos, rows = videos_of(index), Rows()
    samples = [Sample(sample_id=one, seqlen=prod(video.grid(SHRINK))) for one, video in videos.items()]
    step = lanes.step(samples, lambda sample_id: rows.read(Clip(sample_id, videos[sample_id])))
    result = train_step(lanes, model, step, partial(loss_sum, rows.tensors()), label=f"step {index}")
    return result, step.plan.facts.cp_histogram


def step_alone(model: nn.Module, index: int) -> float:
    """Take the same in one process, one clip at a time, and return the loss."""
    clips = [Clip(sample_id, video) for sample_id, video in videos_of(index).items()]
    num_tokens, loss = sum(len(clip.patches) for clip in clips), 0.0
    for clip in clips:
        rows = Rows()
        read = rows.read(clip)
        columns = {name: torch.from_numpy(getattr(read, name))[None] for name in ("tokens", "labels", "loss_mask")}
        part = loss_sum(rows.tensors(), model, columns) / num_tokens
        part.backward()
        loss += part.item()
    return loss


def new_model() -> tuple[VideoDiT, torch.optim.Optimizer]:
    """Return the model, equal on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = VideoDiT()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(lanes_of: Mapping[str, Lanes]) -> dict[str, list[tuple[float, float]]]:
    """Return loss and seconds of each step for each name; steps take turns, so that other programs slow both alike."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in lanes_of}
    models = {name: new_model() for name in lanes_of}
    group = next(iter(lanes_of.values())).mesh.get_group()
    wrapped = {name: DistributedDataParallel(model, process_group=group) for name, (model, _) in models.items()}
    for index in range(NUM_STEPS):
        for name, lanes in lanes_of.items():
            began_s = time.perf_counter()
            result, sizes = step_planned(lanes, wrapped[name], index)
            models[name][1].step()
            models[name][1].zero_grad()
            found[name].append((result.loss, time.perf_counter() - began_s))
            if dist.get_rank() == 0:
                print(f"step {index}, {name}: loss {result.loss:.5f}; number of packs of CP sizes {sizes}")
    return found


def train_alone() -> list[float]:
    """Return the losses of the same steps in one process."""
    model, optimizer = new_model()
    losses = []
    for index in range(NUM_STEPS):
        losses.append(step_alone(model, index))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    """Train from plans, at static CP and alone, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem = problem_for(mesh.size())
    largest = problem.topology.max_cp_size
    static = replace(problem, options=replace(problem.options, min_cp_size=largest, max_cp_size=largest))
    found = train({"planned": Lanes.build(mesh, problem), "static": Lanes.build(mesh, static)})
    if dist.get_rank() == 0:
        losses, planned_s = zip(*found["planned"], strict=True)
        gains = [static_s / one for (_, static_s), one in zip(found["static"], planned_s, strict=True)]
        furthest = max(abs(one - alone) / alone for one, alone in zip(losses, train_alone(), strict=True))
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
        print(f"largest difference of losses to one rank alone {furthest:.0e}")
        print(f"{median(planned_s):.2f} s per step, {median(gains):.2f} times as fast as static CP {largest} (medians)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
