"""The CP groups of a rank: one for each aligned block of lanes that holds it. Files: `first_exchange` (connects a group
and checks it), `process_groups` (builds them all, at start-up), `attention_check` (compares TransformerEngine's
attention in them with plain products).
"""
