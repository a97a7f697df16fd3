"""Models and hardware by name or file: what the planner prices.

Read in this order: `hardware_numbers` (a hardware file, number by number, with units), `table` (what a flag is),
`flags` (those of a model, under Megatron-LM's names, and what each means elsewhere), `architecture` (a model beyond its
shape, and both as flags), `entries` (of a config.json), `families` (of transformers, as rows), `rotation` (RoPE and
experts of a config.json), `hybrids` (layers of one with linear attention), `hugging_face` (all of
transformers), `diffusers`, `catalog` (all of them by name, and which layers a model trains with).
"""
