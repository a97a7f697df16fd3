"""How a run ends: exit codes, signals, one line that says why, and no rank that waits for ever.

Read in this order: `exits` (exit codes, signals, which rank reports), `failures` (errors of device or network),
`stop_guard` (kills stopped processes).
"""
