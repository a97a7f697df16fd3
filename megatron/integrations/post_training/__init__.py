"""Post-training on planned micro-batches: what samples bring, what passes give back, and losses of your own.

    old = passes.forward(step, samples)                         # log-probs, ..., in the order of `samples`
    columns = {"advantages": [...], "old_log_probs": old.tokens["log_probs"]}
    result = passes.train(step, samples, columns, ppo_clip())   # the gradients of that loss of the global batch

A response is what a loss over whole samples counts: a sample, one of several responses to a prompt
(`data.shared_question`), or a branch of a tree of turns (`turns`).

Read in this order: `caller_order` (each token's place in the caller's order), `losses` (how to write a loss),
`objectives` (losses), `torch_passes` and `megatron_passes` (passes in plain PyTorch, and on Megatron's runtime).
"""
