"""How a run ends: exit codes, signals, one line that says why, and nobody who waits for ever.

Read in this order: `last_words` (who says the line), `exits` (exit codes and signals), `failures` (what device or
network do to a run, in its own words), `stop_guard` (kills what somebody stopped).
"""
