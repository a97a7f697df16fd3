"""Post-training on planned micro-batches: what samples bring, what passes give back, and losses of your own.

    old = passes.forward(step, samples)                         # log-probs, ..., in the order of `samples`
    columns = {"advantages": [...], "old_log_probs": old.tokens["log_probs"]}
    result = passes.train(step, samples, columns, ppo_clip())   # the gradients of that loss of the global batch

`passes` are those of Megatron's runtime or of a plain PyTorch loop. A *response* is what a loss over whole samples
counts: a sample, each response of a prompt that several share (`data.shared_question`), or each branch of a tree of
turns (`data.turns`).

Read in this order: `caller_order` (where each token is in the caller's order; columns there, outputs back), `losses`
(how to write a loss), `objectives` (losses), `torch_passes`, `megatron_passes`.
"""
