"""Which tokens of a pack a lane holds.

Read in this order: `sharding` (positions of a lane's zigzag shard), `future_columns` (of multi-token prediction),
`packed_seq_params` (what travels with a micro-batch), `token_owners` (whose each token is).
"""
