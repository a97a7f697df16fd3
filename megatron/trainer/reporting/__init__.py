"""What a run says of itself, in Megatron-LM's words where it has some.

Read in this order: `log` (what a step and a whole run did; log line and scalars), `profiling` (--profile), `quiet`
(what is kept from users).
"""
