"""What to run in thirty minutes of one Hopper GPU: three commands of at most ten minutes, whose logs always come back.

    python -m benchmarks.gpu_session gain    --output runs/gpu      # dynamic over static CP, a whole profile
    python -m benchmarks.gpu_session engine  --output runs/gpu      # TransformerEngine, FP8, whole runs, kernels
    python -m benchmarks.gpu_session hybrids --output runs/gpu      # layers of linear attention: right, and how long

Each part has a limit of its own. Whatever happens to it, its log lies in the folder, `parts.json` has its exit status
and seconds, and the next part runs. `--only PART` repeats one; `--wheels FOLDER` installs wheels from a folder first,
where the machine has no network (docs/GPU.md#a-hopper-machine-without-network).

One GPU cannot show links, NCCL between GPUs or TP. Ranks that share a GPU show values, not seconds: the GPU is never
idle, so what static CP waits for cannot be seen. That is why `gain` computes the lanes of a bucket one after the other.
"""
