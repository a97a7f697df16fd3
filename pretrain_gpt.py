"""Train a GPT with dynamic context parallelism.

    torchrun --nproc-per-node 4 pretrain_gpt.py --help

Everything is imported below the guard: saving a checkpoint starts helper processes that import this file again.
"""

if __name__ == "__main__":
    from megatron.trainer.main import main

    main()
