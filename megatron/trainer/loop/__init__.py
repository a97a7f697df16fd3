"""The iterations of a run. Read in this order: `refining` (corrects the cost model), `training` (the loop)."""
