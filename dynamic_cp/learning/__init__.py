"""A cost model that learns from measured buckets. Read in this order: `observations` (what was measured), `multipliers`
(factors on prices, and the iteration from which each counts), `refinement` (fits them)."""
