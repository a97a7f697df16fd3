"""The lines at the end of a run."""

from megatron.trainer.reporting.log import RunSummary, StepRecord


def record(**changes) -> StepRecord:
    values = {
        "loss": 5.0, "grad_norm": 1.0, "learning_rate": 1e-3, "elapsed_s": 0.5, "predicted_s": 0.4, "planner_s": 0.01,
        "wait_s": 0.005, "num_samples": 8, "num_tokens": 900, "flops": 1.0, "num_microbatches": 2,
        "cp_histogram": {1: 3, 2: 1}, "padding_fraction": 0.1, "imbalance": 1.0, "exchanged_bytes": 500_000,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def test_nothing_to_say_without_iterations():
    assert RunSummary().describe() == ""


def test_the_first_iteration_counts_but_is_not_timed():
    summary = RunSummary()
    for elapsed_s in (60.0, 0.5, 0.5):
        summary.add(record(elapsed_s=elapsed_s))
    said = summary.describe()
    assert "summary of 3 iterations, 2700 tokens, 10.0% padding" in said
    assert "buckets by CP size: 1: 75%, 2: 25%; 1.5 MB exchanged" in said
    assert "500.0 ms per iteration, 1800 tokens/s, measured/predicted 1.250" in said
    assert "planner 10.0 ms per iteration beside the steps, waited for plans and samples 5.00 ms (1.00%)" in said
    assert "static plan" not in said


def test_what_other_processes_took_is_a_mean_over_time():
    summary = RunSummary()
    for elapsed_s, share in ((60.0, 0.9), (1.0, 0.5), (3.0, 0.1)):
        summary.add(record(elapsed_s=elapsed_s, share_of_others=share))
    assert "(without the first iteration); other processes took 20.0% of the cores" in summary.describe()


def test_fallbacks_are_counted():
    summary = RunSummary()
    summary.add(record(is_fallback=True))
    assert "1 iterations ran the static plan" in summary.describe()
    assert "per iteration" not in summary.describe()
