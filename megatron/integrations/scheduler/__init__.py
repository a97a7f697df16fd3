"""The planner as Megatron-Core's packing scheduler: one class, which Megatron-LM, Bridge, verl and NeMo-RL can call.
Files: `groups` (a plan as lists of samples for lanes), `config` (what a framework's configuration says of model and
layout), `job` (what a plan depends on besides samples), `planned` (groups that are never slower than the greedy's, and
the class), `register` (puts it in the place of the framework's own), `from_environment` (the same by an import).
Neither torch nor megatron-core nor a trainer is imported before registering.
"""
