"""All ranks agree on a result or raise the same error: no rank raises alone.

Read in this order: `messages` (values through the job's store and collectives, as data), `phase` (what the run is
doing, for errors), `verify` (agreeing on outcomes, digests and errors; what a lost rank looks like).
"""
