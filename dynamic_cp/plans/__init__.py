"""What a plan is on paper: how it is padded, judged, written and sent.

Read in this order: `padding` (tokens of a bucket), `lane_tokens` (of each of its lanes), `global_batch` (samples of a
step), `pool` (what is legal where servers of all stages compute attention), `validate` (the one judge of what is
legal), `serialize` (text, JSON, digest), `turns` (ticks that are the same on other servers), `server_ticks` (what a
server of a pool does), `lane_plan` (one lane's part).
"""
