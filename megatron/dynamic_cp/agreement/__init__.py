"""All ranks say the same or fail alike: nobody raises alone.

Read in this order: `messages` (values through the job's store and collectives, as data), `lost_peers` (what a lost rank
looks like), `phase` (what the run is doing, for errors), `verify` (agreeing on outcomes, digests and errors).
"""
