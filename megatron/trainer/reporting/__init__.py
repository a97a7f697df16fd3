"""What a run says of itself, in Megatron-LM's words where it has some.

Read in this order: `log` (what a step did; its log line and scalars), `summary` (a few lines at the end), `profiling`
(--profile), `quiet` (what is kept from users).
"""
