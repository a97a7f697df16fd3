"""Train a GPT with dynamic context parallelism.

    torchrun --local-addr localhost --nproc-per-node 4 pretrain_gpt.py --help

Everything is imported below the guard: processes that multiprocessing starts import this file again.
"""

if __name__ == "__main__":
    from megatron.trainer.main import main

    main()
