"""What a run reports, in Megatron-LM's words where it has some.

Read in this order: `log` (log line, scalars, summary), `profiling` (--profile), `quiet` (messages hidden from users).
"""
