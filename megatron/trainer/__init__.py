"""A small trainer on megatron-core with Megatron-LM's flag names: `pretrain_gpt.py` is its command line."""
