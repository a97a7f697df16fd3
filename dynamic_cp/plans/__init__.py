"""What a plan is on paper: how it is padded, judged, written and sent.

Read in this order: `padding` (tokens of a bucket and of each of its lanes), `stretches` (runs of tokens through which
states of linear attention pass), `global_batch` (samples of a step), `extension` (what kinds of plans add), `validate`
(the one judge of what is legal), `serialize` (text, JSON, digest), `lane_plan` (one lane's part).
"""
