"""Models and hardware by name or file: what the planner prices.

Read in this order: `hardware_numbers` (a hardware file, number by number, with units), `table` (what a flag is),
`flags` (those of a model, under Megatron-LM's names, and what each means elsewhere), `catalog` (models and hardware by
name, and which layers a model trains with). A config.json is read by `dynamic_cp.decide.config_json`.
"""
