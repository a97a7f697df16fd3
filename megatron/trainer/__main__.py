"""`torchrun -m megatron.trainer FLAG...`: the command of pretrain_gpt.py where the package is installed."""

if __name__ == "__main__":
    from megatron.trainer.main import main

    main()
