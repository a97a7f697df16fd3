"""How a run ends: exit codes, signals, one line that says why, and nobody who waits for ever.

Read in this order: `exits` (exit codes, signals, who says the last line), `failures` (what device or network do to a
run, in its own words), `stop_guard` (kills what somebody stopped).
"""
