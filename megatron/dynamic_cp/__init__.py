"""Dynamic context parallelism for megatron-core: the runtime that executes the plans of `dynamic_cp`.

It is a sibling of `megatron.core` in the namespace package `megatron`. megatron-core is always built with
`context_parallel_size=1`; every micro-batch brings its own CP group over the data-parallel lanes.

Rooms in the order of their imports, each with its files in the order to read them, here or in its own `__init__.py`:

agreement: all ranks agree on a result or raise the same error: no rank raises alone. Files: `messages` (values through
    the job's store and collectives, as data), `phase` (what the run is doing, for errors), `verify` (agreeing on
    outcomes, digests and errors; what a lost rank looks like).

repairs: fixes to the released megatron-core, each with its reason. Files: `releases` (what differs between them; a
    TransformerEngine that is broken), `cpu_backend` (CPU ranks), `patches` (of layers, losses and the distributed
    optimizer), `triton_imports` (imports without triton).

flags: those of dynamic context parallelism, and what follows from them; a model's are in `dynamic_cp.models.flags`.
    Files: `settings` (planning), `attention` (windows and rotation of layers), `experts`, `layout` (layers of stages,
    CP sizes of exchanges), `exclusions` (features that are not run together), `fp8` (what products in FP8 need of a
    plan), `linear_attention`, `features` (activations, latent attention, modules behind the last layer, norms and
    factors of outputs, adapters), `shape` (what flags say of a model, and the numbers that are priced), `supported`
    (what is refused by name).

attention: over packed sequences (THD) whose CP group belongs to the micro-batch. Files: `packs` (what one kernel call
    computes), `placed_packs` (the packs of placed attention), `kernels` (CPU, flash, cuDNN, portable, Triton; the
    choice), `merge` (adds up results of several packs), `mechanisms` (the exchanges, an executor each), `thd` (the
    autograd function around them), `linear` (layers with a state instead of keys), `torch_thd` (the module that
    megatron-core builds), `te` (TransformerEngine's attention instead of all this).

attention/kernels: they compute one pack, and the choice among them. Files: `triton_programs`, `ranged` (a kernel of our
    own), `merging` (adds up parts of a row's keys), `portable`, `cpu`, `flash`, `cudnn` (the other kernels), `choice`
    (the kernel of a run, checked at start-up).

attention/mechanisms: how the lanes of a CP group compute attention together: one executor for each mechanism. Files:
    `transfers` (what moves between lanes), `executor` (the interface), `ring` (p2p; with latent attention the ring
    passes latents), `collectives` (all_gather, a2a, a2a+p2p), `blocks` (placed attention: tiles on lanes of their own,
    also with heads exchanged).

attention/linear: linear attention of a pack over the lanes of its CP group: gated delta nets and Mamba-2, in one of two
    ways. A layer convolves what it projected (each channel over a few tokens), then passes a state from token to token.
    The lanes of a group either exchange heads, so that each has whole samples for some of them, or keep their tokens
    and exchange what chunks of tokens do to states. A bucket's plan says which
    (`DynamicPackedSeqParams.state_exchange`). Files: `recurrence` (what a token does to a state, and what a kernel is),
    `portable` (the kernel of torch), `layout` (which runs of rows a lane holds, and who holds the tokens before them),
    `layer` (one layer's share of the heads), `states` (one way), `kernels` (the choice among kernels), `thd` (the other
    way, and what modules call).

attention/te: TransformerEngine's attention with a CP group per micro-batch. Files: `support` (what each release and its
    kernels can do), `attention` (the module).

data: from a lane's part of a plan to the micro-batches of a step. Files: `sample_tokens` (what is read of a sample;
    several responses to a prompt as one), `micro_batches` (reads, pads and shards), `prefetch` (in worker processes,
    steps ahead), `token_audit` (is each token where the plan says?), `data_iterator_wrapper` (all this, for a loop).

model: our parts of megatron-core's GPT: attention and routers that take their CP group from the micro-batch. Files:
    `layer_parts` (norms, activations, the residual), `self_attention` (with angles of the local tokens),
    `latent_attention`, `adapters` (of low rank, on linear layers), `linear_layers` (gated delta nets and Mamba-2),
    `experts` (a layer with some, whose router's losses are those of samples), `layer_specs` (a block of such layers),
    `chunked_head` (losses and log-probs over chunks of tokens), `gpt` (the model, and modules that predict further
    tokens).

step: a training step by megatron-core's schedules, and what they need besides. Files: `pipeline_p2p` (messages between
    stages, shaped by the plan), `schedule` (a micro-batch and its loss, one pass of a global batch, and its sums over
    the job), `bucket_times` (seconds of buckets, from which the cost model learns).

pool: steps whose attention servers of all pipeline stages compute (`dynamic_cp.pool`): imported with such a plan.
    Files: `lane_ticks` (what a rank computes in each tick), `layer_pass` (the steps of a layer in two nano-batches, and
    what relays do beside that), `nano_batches` (its attention, between whose steps the layer does the rest), `serving`
    (attention of others' tokens, by a rank that brings none), `block` (layers in two nano-batches of the tokens),
    `ticks` (a schedule with all stages in one phase).
"""

import dynamic_cp  # noqa: F401  # knows the old names of what moved
