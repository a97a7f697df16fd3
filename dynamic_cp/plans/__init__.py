"""What a plan is on paper: how it is padded, judged, written and sent.

Read in this order: `padding` (tokens of a bucket), `lane_tokens` (of each of its lanes), `state_counts` and
`state_runs` (stretches of tokens that states of linear attention pass through, counted and cut), `global_batch`
(samples of a step), `extension` (what kinds of plans add), `validate` (the one judge of what is legal), `serialize`
(text, JSON, digest), `lane_plan` (one lane's part).
"""
