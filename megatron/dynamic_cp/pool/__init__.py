"""Steps whose attention servers of all pipeline stages compute (`dynamic_cp.pool`): imported with such a plan.

Read in this order: `lane_ticks` (what a rank computes in each tick), `layer_pass` (the steps of a layer in two
nano-batches, and what relays do beside that), `nano_batches` (its attention, between whose steps the layer
does the rest), `serving` (attention of others' tokens, by a rank that brings none), `block` (layers in two nano-batches
of the tokens), `ticks` (a schedule with all stages in one phase), `kind` (all this, for data and schedule).
"""
