"""Models and hardware by name or file: what the planner prices.

Read in this order: `hardware_numbers` (a hardware file, number by number, with units), `table` (what a flag is),
`flags` (those of a model, under Megatron-LM's names, and what each means elsewhere), `architecture` (a model beyond its
shape, and both as flags), `entries` (numbers of a config.json), `rotation` and `routing` (its RoPE and experts),
`hybrids` (transformers models with linear attention), `hugging_face` (all others of transformers), `diffusers`,
`catalog` (all of them by name), `layers` (which layers a model trains with).
"""
