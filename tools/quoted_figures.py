"""Makes the figures and outputs that pages quote: runs what a page names and rewrites the lines between its marks.

python -m tools.quoted_figures                 # all parts; the time of each is printed
python -m tools.quoted_figures NAME [...]      # some, by the names in PARTS
python -m tools.quoted_figures --check [...]   # writes nothing; shows what differs; 1 where something does

Run it when the planner or its prices have changed. A mark names its part:

    <!-- begin quoted figures: `python -m tools.quoted_figures NAME` -->
    lines of that part
    <!-- end quoted figures -->

Headline figures are tuned against tuned: `dynamic-cp sweep`, every policy at its own fastest layout. Those at a given
layout are `dynamic-cp simulate`, and say so. All follow from the planner and the cost model, except the losses of
`plain-torch-loop`. What machines measured (seconds, times of day) is typed. The date is that of the last change.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import io
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamic_cp.decide import cli

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end quoted figures -->"
DATE = r"\d{4}-\d\d-\d\d"


class Job(NamedTuple):
    """A comparison: what the pages call it, and the words of the command."""

    name: str
    words: str
    in_readme: bool = True


TUNED = (
    Job("64 H100, 256 samples (the picture)", "--lengths github --global-batch-size 256 --gpus 64 --batches 8"),
    Job(
        "32 H100, 256 samples of at most 64k tokens",
        "--lengths github --global-batch-size 256 --max-seqlen 65536 --gpus 32 --batches 8",
        in_readme=False,
    ),
    Job(
        "128 H100, 1024 samples",
        "--lengths github --global-batch-size 1024 --gpus 128 --batches 4",
        in_readme=False,
    ),
    Job(
        "512 H100, 1024 samples",
        "--lengths github --global-batch-size 1024 --gpus 512 --batches 4",
        in_readme=False,
    ),
    Job(
        "8 H100, 256 samples of at most 8k tokens",
        "--lengths github --max-seqlen 8192 --global-batch-size 256 --gpus 8 --batches 8",
        in_readme=False,
    ),
    Job(
        "32 H100, 256 samples of `sft_longalign`",
        "--lengths sft_longalign --global-batch-size 256 --gpus 32 --batches 8",
    ),
)
"""Jobs of `dynamic-cp sweep`."""

GIVEN = (
    Job(
        "16 lanes × TP 2 × PP 2, 256 samples",
        "--lengths github --global-batch-size 256 --lanes 16 --tp 2 --pp 2 --cp-comm-type auto",
    ),
    Job(
        "the same with ring exchange only",
        "--lengths github --global-batch-size 256 --lanes 16 --tp 2 --pp 2 --cp-comm-type p2p",
    ),
    Job(
        "32 lanes × TP 2 × PP 8, full recomputation, 1024 samples",
        "--lengths github --global-batch-size 1024 --lanes 32 --tp 2 --pp 8 --recompute full --cp-comm-type auto "
        "--batches 4",
    ),
    Job(
        "16 lanes × TP 2, full recomputation, 256 samples of `sft_longalign`",
        "--lengths sft_longalign --global-batch-size 256 --lanes 16 --tp 2 --recompute full --cp-comm-type auto",
    ),
)
"""Jobs of `dynamic-cp simulate`."""

MEASURED = ("4 CPU ranks: lengths of chats, small GPT", "1.47x over balanced CP 4", "2026-11-21")
"""Figures of `make bench` (docs/figures/planner.md#measured-on-cpu-ranks), and their date."""

LIMITS = ("auto", "12288", "8192")
LIMIT_JOB = "--lengths github --global-batch-size 256 --batches 4 --lanes 16 --tp 2 --policy dynamic,balanced"
BATCH_SIZES = (32, 128, 512)
BATCH_JOB = "--lengths github --batches 4 --lanes 16 --tp 2 --policy dynamic,balanced"
STATES = "--grad-reduce-in-bf16"
BLOCK_JOB = "--global-batch-size 128 --gpus 64 --model llama-3-70b --batches 2 --policy dynamic"
BLOCK_ROWS = (("github", ""), ("github", STATES), ("sft_longalign", ""), ("sft_longalign", STATES))
CHUNKS_JOB = (
    "--lengths github --global-batch-size 64 --max-seqlen 65536 --model qwen2.5-7b --lanes 8 --recompute full "
    "--cp-comm-type auto"
)
VIDEO_JOB = (
    "--lengths clips.txt --global-batch-size 64 --max-seqlen 131072 --model wan2.1-t2v-14b --gpus 64 --batches 8"
)
PLACED_JOB = (
    "--lengths lognormal:mean=4096,sigma=0.1 --global-batch-size 1 --lanes 6 --tp 2 --mask lambda:64,1024 "
    "--cp-comm-type blocks"
)

Lines = list[str]
Quoted = Mapping[str, Lines]
"""Page -> the lines that it quotes of a part."""
Results = list[tuple[Job, dict[str, Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the parts that are asked for, or show what is stale; return 1 where something is, asked with --check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"a part: {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--check", action="store_true", help="write nothing, show what differs")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.names) - set(PARTS)):
        parser.error(f"no part is called {', '.join(unknown)}: there are {', '.join(PARTS)}")
    stale: Lines = []
    begin_s = time.perf_counter()
    for name in options.names or PARTS:
        start_s = time.perf_counter()
        changed = changes(name)
        for page, text in changed.items():
            if options.check:
                before = (ROOT / page).read_text(encoding="utf-8")
                stale += difflib.unified_diff(
                    before.splitlines(), text.splitlines(), page, "made anew", n=0, lineterm=""
                )
            else:
                (ROOT / page).write_text(text, encoding="utf-8")
        said = "differs on" if options.check else "changed"
        print(f"{time.perf_counter() - start_s:6.1f} s  {name}: {said} {', '.join(changed) or 'nothing'}", flush=True)
    print(f"{time.perf_counter() - begin_s:6.1f} s  together", flush=True)
    print("\n".join(stale), end="\n" * bool(stale))
    return int(bool(stale))


def changes(name: str) -> dict[str, str]:
    """Return page -> new text, for the pages on which a part says something new."""
    changed = {}
    for page, lines in PARTS[name]().items():
        text = (ROOT / page).read_text(encoding="utf-8")
        if not agrees(quoted(text, name, page), lines):
            changed[page] = with_figures(text, lines, name, page)
    return changed


def agrees(before: Lines, after: Lines) -> bool:
    """Return whether lines say the same, but for dates and for 1 in the last digit of decimals, as processors round."""
    number, one, other = rf"{DATE}|\d+\.\d+", "\n".join(before), "\n".join(after)
    if re.sub(number, "N", one) != re.sub(number, "N", other):
        return False
    pairs = zip(re.findall(number, one), re.findall(number, other), strict=True)
    return all("-" in mine or _is_close(mine, theirs) for mine, theirs in pairs)


def _is_close(one: str, other: str) -> bool:
    digits = len(one.partition(".")[2])
    return digits == len(other.partition(".")[2]) and abs(float(one) - float(other)) < 1.5 * 10**-digits


def begin_of(name: str) -> str:
    """Return the mark before the lines of a part."""
    return f"<!-- begin quoted figures: `python -m tools.quoted_figures {name}` -->"


def quoted(text: str, name: str, page: str) -> Lines:
    """Return the lines that a page with `text` quotes of a part."""
    _, begin, rest = text.partition(begin_of(name))
    lines, end, _ = rest.partition(END)
    assert begin, f"{page} has no place for {name}"
    assert end, f"{page} has no end of {name}"
    return lines.strip("\n").splitlines()


def with_figures(text: str, lines: Lines, name: str, page: str) -> str:
    """Return the text of a page with `lines` between the marks of a part."""
    quoted(text, name, page)
    before, begin, rest = text.partition(begin_of(name))
    return before + "\n".join([begin, *lines, END]) + rest.partition(END)[2]


def headline() -> Quoted:
    """Return the comparisons with static CP and with peers."""
    tuned = [(job, _result("sweep", job.words)) for job in TUNED]
    given = [(job, _result("simulate", job.words)) for job in GIVEN]
    return {
        "README.md": _readme(tuned),
        "docs/how-to/decide.md": _decide(tuned, given),
        "docs/backtest.md": _peers(tuned),
    }


def _readme(tuned: Results) -> Lines:
    lines = [
        "| Llama-3-8B, GitHub files; every policy at its own fastest layout | over the best static CP "
        "| the same under other prices | verdict | over Megatron dev's greedy | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {job.name} | {gain(one, best_static(one))} | {range_of(one)} | {verdict(one)} | "
        f"{gain(one, 'megatron-dev', named=False)} | modelled |"
        for job, one in tuned
        if job.in_readme
    ]
    lines.append(f"| {MEASURED[0]} | {MEASURED[1]} | – | – | – | measured |")
    return [*lines, "", f"Modelled {_today()}, measured {MEASURED[2]}."]


def _decide(tuned: Results, given: Results) -> Lines:
    lines = [
        "| job | dynamic | best static | gain | under other prices | over megatron-dev | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {job.name} | {_setting(one, 'dynamic')} | {_setting(one, best_static(one))} | "
        f"{gain(one, best_static(one), named=False)} | {range_of(one)} | "
        f"{gain(one, 'megatron-dev', named=False)} | {verdict(one)} |"
        for job, one in tuned
    ]
    lines += ["", f"Modelled on {_today()}, Llama-3-8B on H100. In the same order:", ""]
    lines += ["```text", *(f"dynamic-cp sweep {job.words}" for job in TUNED), "```", ""]
    lines += [
        "Where the layout is given, all policies run at that one. It may suit one of them better than another, so",
        "these are not gains over a job that was tuned without dynamic CP. `simulate --lanes` tries no other prices.",
        "",
        "| given layout | over the best static CP | over megatron-dev | verdict |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {job.name} | {gain(one, best_static(one))} | {gain(one, 'megatron-dev', named=False)} | {verdict(one)} |"
        for job, one in given
    ]
    return [*lines, "", "```text", *(f"dynamic-cp simulate {job.words}" for job in GIVEN), "```"]


def _peers(tuned: Results) -> Lines:
    lines = ["| job | over megatron-dev | over static | over balanced |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {job.name} | "
        + " | ".join(gain(one, name, named=False) for name in ("megatron-dev", "static", "balanced"))
        + " |"
        for job, one in tuned
    ]
    return [*lines, "", f"Modelled {_today()}; every policy at its own fastest layout, 95% intervals."]


def block_recomputation() -> Quoted:
    """Return what recomputing some layers of each chunk gives over all or none, at the fastest layout of each."""
    lines = ["| lengths | none, selective, full | and block |", "| --- | --- | --- |"]
    for lengths, states in BLOCK_ROWS:
        words = f"--lengths {lengths} {BLOCK_JOB} {states}".rstrip()
        cells = (_result("sweep", words + " --recompute none,selective,full"), _result("sweep", words))
        named = f"`{lengths}`" + f", `{states}`" * bool(states)
        lines.append(f"| {named} | " + " | ".join(_setting(one, "dynamic") for one in cells) + " |")
    lines += ["", f"Seconds per batch of Llama-3-70B on 64 H100, modelled on {_today()} by", ""]
    return {"docs/how-to/decide.md": [*lines, "```text", f"dynamic-cp sweep --lengths github {BLOCK_JOB}", "```"]}


def token_limit() -> Quoted:
    """Return seconds and bytes at several limits of tokens, of dynamic and of balanced static CP."""
    lines = ["| limit | dynamic, s | GB | balanced, s | GB |", "| --- | --- | --- | --- | --- |"]
    for limit in LIMITS:
        policies = _result("simulate", f"{LIMIT_JOB} --max-tokens-per-rank {limit}")["policies"]
        dynamic, static = policies["dynamic"], policies["balanced"]
        found = f" ({dynamic['max_tokens_per_rank']})" if limit == "auto" else ""
        lines.append(
            f"| `{limit}`{found} | {_mean_s(dynamic):.3f} | {_peak_gb(dynamic):.1f} | {_mean_s(static):.3f} "
            f"(CP {static['static_cp_size']}) | {_peak_gb(static):.1f} |"
        )
    there = dynamic["available_bytes"] / 1e9
    lines += ["", f"Llama-3-8B on 32 H100, of which {there:.1f} GB each may be used; modelled on {_today()} by", ""]
    return {"docs/how-to/decide.md": [*lines, "```text", f"dynamic-cp simulate {LIMIT_JOB}", "```"]}


def global_batch() -> Quoted:
    """Return tokens per second of global batches of several sizes, dynamic and balanced static CP."""
    lines = [
        "| samples | per lane | dynamic: s per batch | tokens/s per GPU | balanced: the same | gain | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in BATCH_SIZES:
        one = _result("simulate", f"{BATCH_JOB} --global-batch-size {size}")
        rates = [one["policies"][name]["mean"]["tokens_per_s_per_gpu"] for name in ("dynamic", "balanced")]
        lines.append(
            f"| {size} | {size // 16} | {_mean_s(one['policies']['dynamic']):.3f} | {rates[0]:.0f} | {rates[1]:.0f} | "
            f"{gain(one, 'balanced', named=False)} | {verdict(one)} |"
        )
    lines += ["", f"Modelled on {_today()} by", ""]
    words = f"dynamic-cp simulate {BATCH_JOB} --global-batch-size {BATCH_SIZES[0]}"
    return {"docs/how-to/decide.md": [*lines, "```text", words, "```"]}


def placed_plan() -> Quoted:
    """Return a line of a plan whose bucket is placed."""
    printed = _printed("plan", PLACED_JOB)
    line = next(line for line in printed if " blocks (" in line)
    words = f"dynamic-cp plan {PLACED_JOB}"
    return {"docs/how-to/decide.md": ["```text", words, "", line.rstrip(), "```"]}


def which_cp_size() -> Quoted:
    """Return the table that `examples/which_cp_size.py` prints."""
    out = _ran(sys.executable, "examples/which_cp_size.py")
    return {"docs/api.md": ["```text", *out, "```"]}


def planner_example() -> Quoted:
    """Return what the first example of the planner's page prints."""
    page = "docs/planner.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    _, *shown = _ran(sys.executable, "-c", code)  # the first line says the sizes that the code has
    return {page: ["```text", *shown, "```"]}


def verl_splitter() -> Quoted:
    """Return what the example of a splitter prints."""
    out = _ran(sys.executable, "examples/micro_batch_splitter_verl.py")
    shown = [line for line in out if not line.startswith("  CP sizes ")]
    return {"docs/how-to/other-loops.md": ["```text", *shown, "```"]}


def plain_torch_loop() -> Quoted:
    """Return the first steps of the example of a plain loop."""
    words = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4")
    out = _ran(sys.executable, *words, "examples/loop_plain_torch.py")
    return {"docs/how-to/other-loops.md": ["```text", *out[:2], "```"]}


def scheduler_groups() -> Quoted:
    """Return what the planner gives as Megatron-Core's scheduler."""
    command = (sys.executable, "-m", "benchmarks.grpo_groups")
    narrow, wide, flat = (_ran(*command, *words) for words in ((), ("--limit", "16384"), ("--flat",)))
    smallest = [re.findall(r"smallest (\S+), geometric mean (\S+);", out[-1])[0] for out in (narrow, wide)]
    (least, mean), (least_wide, mean_wide) = ((f"{float(one[0]):.3f}", one[1]) for one in smallest)
    rows = _table_of(narrow)
    ratios = [ratio for row in _table_of(flat)[len(rows) :] for ratio in re.findall(r"\| (\d\.\d+)", row)]
    said = _sentences(
        f"Smallest {least}, geometric mean {mean}; with at most 16384 tokens on a rank {least_wide} and {mean_wide},",
        "because the greedy then leaves a pipeline of 8 stages too few micro-batches. Without a pipeline (`--flat`)",
        f"{min(ratios)} to {max(ratios)}.",
    )
    return {"docs/how-to/other-loops.md": [*rows, "", *said]}


def video() -> Quoted:
    """Return the gain for video clips of many lengths."""
    page = "docs/how-to/other-loops.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    (clips,) = re.findall(r"^printf '%s\\n' ([\d \\\n]+) > clips.txt$", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clips.txt"
        path.write_text("\n".join(clips.replace("\\", " ").split()) + "\n", encoding="utf-8")
        one = _result("simulate", VIDEO_JOB.replace("clips.txt", str(path)))
    said = f"{gain(one, best_static(one))}, each at its own fastest layout: {verdict(one)} ({_today()}, modelled)."
    return {page: ["```text", f"dynamic-cp simulate {VIDEO_JOB}", "```", "", f"It predicts {said}"]}


def latent_exchange() -> Quoted:
    """Return what exchanging latents gives for one layer, in which groups are large, and for whole batches."""
    out = _ran(sys.executable, "-m", "benchmarks.latent_exchange")
    layer, batches = _table_of(out[: out.index("")]), _table_of(out[out.index("") :])
    kept = [line for line in layer[2:] if re.match(r"\| (8|16) ", line) and re.search(r"\| (p2p|a2a|latent) \|", line)]
    between = [
        "",
        "Global batches of 512 samples up to 128k on the published config.json (without rotary scaling and multi-token",
        "prediction; memory not checked), full recomputation, the exchange chosen for every bucket:",
        "",
    ]
    return {"docs/mechanisms.md": [*layer[:2], *kept, *between, *batches]}


def hybrids() -> Quoted:
    """Return what dynamic CP gives hybrids."""
    rows = _table_of(_ran(sys.executable, "-m", "benchmarks.hybrids"))
    return {"docs/how-to/decide.md": [*rows, "", *gains_of_hybrids(rows)]}


def gains_of_hybrids(rows: Lines) -> Lines:
    """Return the sentences that say what the table of hybrids shows."""
    cells = _cells_of(rows)
    hybrids = [row for row in cells if not row[0].startswith("full ")]
    twins = [row for row in cells if row[0].startswith("full ")]

    def range_over(rows: list[list[str]], lengths: str) -> str:
        found = [float(row[4].split()[0]) for row in rows if row[1] == lengths and row[4] != "-"]
        return f"{min(found):.2f} to {max(found):.2f}"

    states = max(float(row[7].split()[0]) for row in hybrids)
    return _sentences(
        f"Over static CP hybrids gain {range_over(hybrids, 'github')} times for code and documents,",
        f"the *full* models {range_over(twins, 'github')};",
        f"{range_over(hybrids, 'sft_longalign')} for chats with some long ones.",
        f"Where buckets pass on states it is up to {states:.2f} times the gain by heads alone,",
        "most where they span nodes.",
    )


def exchange_gains() -> Quoted:
    """Return what exchanges chosen per bucket give, as the planner's page has it."""
    page = (ROOT / "docs" / "figures" / "planner.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- begin exchanges-frozen -->(.*?)<!-- end", page, re.DOTALL)
    cells = _cells_of(_table_of(table.splitlines()))

    def ratios(heads: str, *cases: str) -> list[str]:
        return sorted(row[5] for row in cells if row[1] == heads and row[0] in cases)

    github, longest = "github_pp8_n32_128k", "real_github_bal_pp8_n32_128k"
    many, few, one = ratios("MHA", github), ratios("GQA", github, longest), ratios("MHA", longest)
    said = _sentences(
        "Modelled ([planner.md](figures/planner.md#exchanges) has all cases, with the command): with exchanges chosen",
        f"per bucket, pipelines of 8 stages on 32 lanes take {many[0]} to {many[-1]} of the ring's time with",
        f"GitHub-like lengths and multi-head attention, {one[0]} to {one[-1]} where one sample of 128k dominates, and",
        f"{few[0]} to {few[-1]} with 8 KV heads.",
    )
    return {"docs/mechanisms.md": said}


def loss_chunks() -> Quoted:
    """Return what chunks of logits do to the token limit and the time of a plan."""
    lines = ["| logits of | tokens on a rank at once | GB of a rank | s per batch |", "| --- | --- | --- | --- |"]
    for name, words in (("all tokens", ""), ("1024 tokens", " --loss-chunk-tokens auto")):
        one = _result("plan", CHUNKS_JOB + words)
        lines.append(
            f"| {name} | {one['max_tokens_per_rank']} | {one['peak_bytes'] / 1e9:.1f} | {one['predicted_s']:.3f} |"
        )
    lines += ["", f"Modelled on {_today()} by this command, the first row without its last option:", "", "```text"]
    return {"docs/how-to/decide.md": [*lines, f"dynamic-cp plan {CHUNKS_JOB} --loss-chunk-tokens auto", "```"]}


PARTS: Mapping[str, Callable[[], Quoted]] = {
    "exchange-gains": exchange_gains,
    "loss-chunks": loss_chunks,
    "planner-example": planner_example,
    "which-cp-size": which_cp_size,
    "verl-splitter": verl_splitter,
    "plain-torch-loop": plain_torch_loop,
    "placed-plan": placed_plan,
    "scheduler-groups": scheduler_groups,
    "token-limit": token_limit,
    "global-batch": global_batch,
    "latent-exchange": latent_exchange,
    "video": video,
    "block-recomputation": block_recomputation,
    "headline": headline,
    "hybrids": hybrids,
}
"""Name -> what makes its lines; the cheap ones first."""


def _today() -> str:
    return datetime.date.today().isoformat()


def _printed(command: str, words: str) -> Lines:
    """Return the lines that `dynamic-cp` prints."""
    start_s, out = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main([command, *words.split()])
    assert status == 0, words
    print(f"{time.perf_counter() - start_s:6.1f} s  dynamic-cp {command} {words}", file=sys.stderr, flush=True)
    return out.getvalue().splitlines()


def _result(command: str, words: str) -> dict[str, Any]:
    """Return the figures of a comparison."""
    result: dict[str, Any] = json.loads("\n".join(_printed(command, f"{words} --json -")))
    return result


def _ran(*words: str) -> Lines:
    """Return the lines that a program of this folder prints."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
    return done.stdout.splitlines()


def _sentences(*parts: str) -> Lines:
    return textwrap.wrap(" ".join(parts), width=120, break_on_hyphens=False)


def _table_of(lines: Iterable[str]) -> Lines:
    return [line for line in lines if line.startswith("|")]


def _cells_of(rows: Lines) -> list[list[str]]:
    """Return the cells of a table without its head."""
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows[2:]]


def best_static(result: dict[str, Any]) -> str:
    """Return the static policy that dynamic CP was judged against, the fastest one."""
    return min(("static", "balanced"), key=lambda name: result["speedup"][name]["ratio"])


def gain(result: dict[str, Any], baseline: str, *, named: bool = True) -> str:
    """Return the speed-up over a policy with its interval, such as `1.31x (1.27..1.35) over static CP 8`."""
    one = result["speedup"][baseline]
    text = f"{one['ratio']:.2f}x ({one['low']:.2f}..{one['high']:.2f})"
    if round(one["ratio"], 2) < 1:
        text = f"**{text}**"
    return f"{text} over {baseline} CP {_cp_size(result, baseline)}" if named else text


def verdict(result: dict[str, Any]) -> str:
    """Return the command's own words: `gains`, `may pay`, `does not pay` or `loses`."""
    found = re.search(r"dynamic CP (gains|may pay|does not pay|loses)", result["verdict"]["headline"])
    assert found, result["verdict"]["headline"]
    return found[1]


def range_of(result: dict[str, Any]) -> str:
    """Return the least and the largest gain under other prices, such as `1.00..1.17x`."""
    ratios = [one["ratio"] for one in result["other_prices"].values()]
    return f"{min(ratios):.2f}..{max(ratios):.2f}x"


def _mean_s(policy: dict[str, Any]) -> float:
    seconds: float = policy["mean"]["iteration_s"]
    return seconds


def _peak_gb(policy: dict[str, Any]) -> float:
    peak_bytes: float = max(one["peak_bytes"] for one in policy["batches"])
    return peak_bytes / 1e9


def _cp_size(result: dict[str, Any], policy: str) -> int:
    one = result["policies"][policy]
    size: int = (one["best"] if "best" in one else one["setting"])["static_cp_size"]
    return size


def _setting(result: dict[str, Any], policy: str) -> str:
    one = result["policies"][policy]["best"]
    words = [f"TP {one['tp']}", f"PP {one['pp']}", *([f"VPP {one['vpp']}"] if one["vpp"] > 1 else [])]
    words += [f"{one['lanes']} lanes", *([f"CP {one['static_cp_size']}"] if policy != "dynamic" else [])]
    words += [] if one["recompute"] == "none" else [_recomputation(one)]
    name = "" if policy == "dynamic" else f"{policy}, "
    return f"{one['iteration_s']:.3f} s ({name}{', '.join(words)})"


def _recomputation(setting: dict[str, Any]) -> str:
    if setting["recompute_method"] == "block":
        return f"recomputation of {setting['recompute_num_layers']} layers a chunk"
    return f"{setting['recompute']} recomputation"


if __name__ == "__main__":
    sys.exit(main())
