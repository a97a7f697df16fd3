"""Run a script of a Megatron-LM checkout with dynamic context parallelism.

python -m megatron.dynamic_cp.run CHECKOUT/pretrain_gpt.py [the script's flags] --dynamic-cp
torchrun ... -m megatron.dynamic_cp.run CHECKOUT/pretrain_gpt.py [the script's flags] --dynamic-cp

Without --dynamic-cp the script runs as it is (on CPU ranks with --distributed-backend gloo). The code is in
`megatron.integrations.lm_adaptor`.
"""

from __future__ import annotations

from megatron.integrations.lm_adaptor.run import main

if __name__ == "__main__":
    main()
