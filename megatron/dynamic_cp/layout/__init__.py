"""Which tokens of a pack a lane holds.

Read in this order: `sharding` (positions of a lane's zigzag shard), `packed_seq_params` (what travels with a
micro-batch), `token_owners` (whose each token is).
"""
