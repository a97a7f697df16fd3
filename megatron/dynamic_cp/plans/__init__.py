"""How every rank gets the plan of a step. Files: `plan_dump` (plans written down, and replayed), `planner` (rank 0's
planner process and what it publishes), `plan_source` (where each rank gets its part).
"""
