"""Models and hardware by name or file: what the planner prices.

Read in this order: `hardware_numbers` (a hardware file, number by number, with units), `architecture` (the flags of
Megatron-LM that describe a model), `hugging_face` (a config.json of transformers), `diffusers` (one of diffusers),
`catalog` (all of them by name).
"""
