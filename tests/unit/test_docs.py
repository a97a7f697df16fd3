"""What README and docs show is run, parsed or looked up; the site builds strictly.

A block of code that is not run says why in a comment before it: `<!-- not run: REASON -->`. Its flags, targets,
files and imports are still checked. `text` blocks are drawings and output.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pytest

from dynamic_cp import load_hardware, load_model
from dynamic_cp.decide import cli
from dynamic_cp.decide.cli.app import COMMANDS, TRAINING_COMMANDS
from dynamic_cp.decide.cli.app import group as cli_group
from dynamic_cp.decide.config_json.hugging_face import load_architecture
from dynamic_cp.decide.first_day.command import command as first_day
from dynamic_cp.decide.sweep.flags import model_flags
from megatron.decide.calibration.command import command as profile
from megatron.dynamic_cp.flags.exclusions import EXCLUSIONS
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.integrations.weights.command import command as weights
from megatron.trainer.flags.arguments import build_parser, parse_args
from megatron.trainer.setup import planned_runtime
from tests.unit.test_rooms import ROOMS
from tools import feature_map, flags_page, make_drawings, quoted_figures

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")])
EXAMPLES = sorted(
    ROOT / "examples" / name
    for name in re.findall(r"`examples/([\w]+\.py)`", (DOCS / "api.md").read_text(encoding="utf-8"))
)
PICTURES = {"draw_pipeline": "pipeline", "dpo": "dpo", "grpo": "grpo"}
"""Example -> the picture that it writes."""
KNOWN_LANGUAGES = {"python", "sh", "text"}


class Block(NamedTuple):
    """A fenced block: its page, first line, language, text, and why it is not run (None: it is)."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    blocks, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        reason = re.fullmatch(r"<!-- not run: (.+) -->", lines[start - 1]) if start else None
        text = "\n".join(lines[start + 1 : number]) + "\n"
        blocks.append(Block(page, start + 1, lines[start][3:].strip(), text, reason and reason[1]))
        start = None
    assert start is None, f"{page}: a block is not closed"
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, with the flags of a model where it takes those of a file."""
    flags = " ".join(model_flags(load_model("qwen3-8b"), load_architecture("qwen3-8b"), tp_size=1).values())
    text = re.sub(r"\$\(cat \S+/model\.flags\)", flags, block.text)
    lines = text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_blocks_are_of_known_languages() -> None:
    assert len(BLOCKS) >= 25
    assert {block.language for block in BLOCKS} == KNOWN_LANGUAGES, [
        block.name for block in BLOCKS if block.language not in KNOWN_LANGUAGES
    ]
    for page in PAGES:  # an indented block would be neither run nor looked at
        outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"\n\n {4}(?!:|options)(?![-*] )\S.*\n\n", outside), page


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=lambda block: block.name)
def test_python_blocks(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(block.text)
    imports = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    for one in imports:
        spec = importlib.util.find_spec(one.module or "")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        for alias in one.names:
            assert re.search(rf"\b{alias.name}\b", source), f"{one.module} has no {alias.name}"
    assert imports
    if block.not_run is not None:
        return
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, block.name, "exec"), {"__name__": "docs"})
    assert "lanes" in out.getvalue()


@pytest.mark.by_day("README.md", "operate.md")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(one.language == "sh" for one in blocks_of(page))], ids=lambda page: page.name
)
def test_shell_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in one folder, one after the other: what one writes the next may read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    num_commands = 0
    for block in blocks_of(page):
        if block.language != "sh":
            continue
        for words in commands_of(block):
            num_commands += 1
            if words[0] == "dynamic-cp" and words[1] not in ("profile", "weights", "first-day"):
                assert block.not_run is None, f"{block.name}: run it"
                out = io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    status = cli.main(words[1:])
                # Refusing is no crash, but no page may show a refused command; doctor may find fault with a machine.
                assert status == 0 or words[1] == "doctor", f"{block.name}: {shlex.join(words)}\n{out.getvalue()}"
                assert out.getvalue() or "--output" in words
            elif words[0] == "printf":
                assert words[-2] == ">"
                line = block.text.replace("\\\n", " ").splitlines()[0]
                subprocess.run(["sh", "-c", line], check=True, timeout=10)
            else:
                assert block.not_run is not None, f"{block.name}: {words[0]} is not run and no reason is given"
                check_not_run(words)
    assert num_commands


def check_not_run(words: list[str]) -> None:
    """A command that is not run names what exists, and its flags parse."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets
    elif words[:2] == ["dynamic-cp", "profile"] or "megatron.decide.calibration" in words:
        # Measuring takes minutes and changes this process for CPU ranks; tests/distributed/test_profile.py runs it.
        context = profile.make_context("profile", words[words.index("--model") :])
        assert context.params["output"]
    elif words[:2] == ["dynamic-cp", "first-day"]:  # it takes minutes; tests/distributed/test_profile.py runs it
        assert first_day.make_context("first-day", words[2:]).params["output"]
    elif words[:2] == ["dynamic-cp", "weights"]:  # they need a model; tests/trainer/test_weights.py runs them
        context = weights.commands[words[2]].make_context(words[2], words[3:])
        assert context.params["output"]
    elif "megatron.dynamic_cp.run" in words:  # the rest are Megatron-LM's flags
        assert importlib.util.find_spec("megatron.dynamic_cp.run")
    elif words[1:3] in (["-m", "pytest"], ["-m", "tools.releases"]):
        tests = [word for word in words[3:] if "/" in word]
        assert tests
        assert all((ROOT / word).exists() for word in tests)
    elif words[0] == "torchrun" and words[-1].startswith("examples/"):
        assert ROOT / words[-1] in EXAMPLES
    elif words[0] == "torchrun":
        num_ranks = int(words[words.index("--nproc-per-node") + 1])
        settings = parse_args(words[words.index("pretrain_gpt.py") + 1 :], world_size=num_ranks)
        assert settings.planning.policy == "dynamic"
    elif words[0] == "sh":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "sbatch":
        (script,) = [word for word in words if word.endswith(".sbatch")]
        assert (ROOT / script).is_file()
        needed = ("--num-layers=1", "--hidden-size=8", "--num-attention-heads=1", "--seq-length=8", "--lr=1")
        build_parser().parse_args([*needed, *words[words.index(script) + 1 :]])
    elif words[0] == "docker":
        if "dynamic-cp" in words:
            check_planned(words[words.index("dynamic-cp") :])
        if "pretrain_gpt.py" in words:
            settings = parse_args(words[words.index("pretrain_gpt.py") + 1 :], world_size=8)
            assert settings.planning.policy == "dynamic"
    else:
        assert words[0] in ("python3", ".venv/bin/pip", "pip", "."), words


def check_planned(words: list[str]) -> None:
    """A command of the planner plans its job and does not refuse it; one batch says whether it would."""
    draws = words[1] == "simulate" or (words[1] == "sweep" and "--global-batch-size" in words)
    several = ["--batches", "1"] if draws else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = cli.main([*words[1:], *several])
    assert status == 0, f"{shlex.join(words)}\n{out.getvalue()}"
    assert out.getvalue() or "--output" in words or "--json" in words


def examples_of_help() -> list[list[str]]:
    """Return the words of the examples that `--help` of each command ends with, without what a shell does with them."""
    context, commands = click.Context(cli_group), [cli_group]
    for name in cli_group.list_commands(context):
        command = cli_group.get_command(context, name)
        assert command is not None
        commands += command.commands.values() if isinstance(command, click.Group) else [command]
    lines = "\n".join(one.epilog or "" for one in commands).replace("\\\n", " ").splitlines()
    return [re.split(r" [|>#] ", line + " ")[0].split() for line in lines if line.startswith("  dynamic-cp ")]


OTHERS = ("profile", "weights", "first-day")
NEEDS_MORE = {"--run": "a run's dump", "--tokenizer": "a tokenizer", "doctor": "a sound machine"}
"""What an example has in it -> what it needs that a test of pages lacks; tests of these commands have it."""


def is_costly(words: list[str]) -> bool:
    return "sweep" in words or "--gpus" in words


def is_left_to_night(words: list[str]) -> bool:
    """Return whether an example takes seconds; tests/unit/command shows by day that its command runs."""
    return is_costly(words) or words[1] in ("simulate", "trace", "report")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=" ".join(words), marks=[pytest.mark.nightly] if is_left_to_night(words) else [])
        for words in examples_of_help()
        if not any(word in words for word in NEEDS_MORE)
    ],
)
def test_examples_of_help(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if words[1] in OTHERS:
        check_not_run(words)
        return
    lengths = [100 + 37 * number % 7900 for number in range(300)]
    for name in ("lengths.txt", "my_lengths.csv"):
        (tmp_path / name).write_text("length\n" * (name[-3:] == "csv") + "\n".join(map(str, lengths)), encoding="utf-8")
    np.save(tmp_path / "lengths.npy", lengths)
    if words[1] == "check":
        check_planned(
            ["dynamic-cp", "plan", *["--lengths", "lengths.npy", "--lanes", "4", "--tp", "4", "--output", "plan.json"]]
        )
    check_planned(words)


def test_every_command_has_examples() -> None:
    examples = examples_of_help()
    assert {*COMMANDS, *TRAINING_COMMANDS} <= {words[1] for words in examples}
    assert sum(words[1] not in OTHERS and not is_costly(words) for words in examples) >= 15


def num_ranks_of(example: Path) -> int:
    """Return on how many ranks torchrun starts an example, as its docstring says; one without torchrun is one."""
    found = re.search(
        r"^torchrun --local-addr localhost --nproc-per-node (\d+)", example.read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found[1]) if found else 1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Return what an example printed, and its folder, once it has run there as its reader starts it."""

    @cache
    def run(name: str) -> tuple[str, Path]:
        example, folder = ROOT / "examples" / f"{name}.py", tmp_path_factory.mktemp(name)
        ranks = ["--nproc-per-node", str(num_ranks_of(example))]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", *ranks]
        command = [sys.executable, *(launcher if num_ranks_of(example) > 1 else []), str(example)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, folder

    return run


@pytest.mark.by_day("does_it_pay")
@pytest.mark.parametrize("name", [example.stem for example in EXAMPLES])
def test_examples_run(name: str, ran: Callable[[str], tuple[str, Path]]) -> None:
    out, folder = ran(name)
    assert len(out.splitlines()) >= 4
    written = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert written == ([f"runs/{PICTURES[name]}.svg"] if name in PICTURES else [])


@pytest.mark.nightly
def test_the_video_model_trains_as_one_rank_does(ran: Callable[[str], tuple[str, Path]]) -> None:
    out, _ = ran("video_dit")
    losses = [float(loss) for loss in re.findall(r"^step \d, planned: loss ([\d.]+)", out, re.MULTILINE)]
    assert len(losses) >= 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]
    (furthest,) = re.findall(r"largest difference of losses to one rank alone (\S+)", out)
    assert float(furthest) <= 5e-6
    assert "{1: 4, 2: 2, 4: 1}" in out, "CP sizes are mixed in a batch"


@pytest.mark.nightly
def test_the_own_iterator_learns_in_groups_of_mixed_sizes(ran: Callable[[str], tuple[str, Path]]) -> None:
    out, _ = ran("own_iterator")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    sizes = [set(re.findall(r"\d", of_step)) for of_step in re.findall(r"CP sizes of rank 0's buckets \[(.*)\]", out)]
    assert {"1", "2"} in sizes


def test_excerpt_is_of_the_example() -> None:
    (excerpt,) = [
        block
        for block in blocks_of(DOCS / "how-to" / "other-loops.md")
        if block.language == "python" and "excerpt" in (block.not_run or "")
    ]
    lines = {line.strip() for line in (ROOT / "examples" / "own_iterator.py").read_text(encoding="utf-8").splitlines()}
    assert len(excerpt.text.splitlines()) >= 25
    assert {line.strip() for line in excerpt.text.splitlines()} <= lines


def test_flags_and_options_are_those_of_the_parsers() -> None:
    remedy = "run `python -m tools.flags_page` and commit docs/flags.md and docs/command.md"
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == flags_page.flags_page(), remedy
    assert (DOCS / "command.md").read_text(encoding="utf-8") == flags_page.command_page(), remedy


def test_every_feature_has_its_row_and_every_room_a_feature() -> None:
    page = (DOCS / "extend.md").read_text(encoding="utf-8")
    assert page == feature_map.with_table(page), "run `python -m tools.feature_map` and commit docs/extend.md"
    assert all(row.count("`") >= 4 for row in feature_map.table().splitlines()[2:]), "each has files and tests"
    rooms = [f"{package.replace('.', '/')}/{room}/" for package, rooms in ROOMS.items() for room in rooms]
    assert [room for room in rooms if room not in page and not room.startswith("dynamic_cp/types/")] == []


def test_pairs_of_the_page_are_refused_whatever_else_a_run_says():
    """What is refused under a condition only says so in its row."""
    on = {"num_experts": 4, "window_size": (7, 0), "fp8": "hybrid", "add_qkv_bias": True, "bias_swiglu_fusion": True}
    defaults = {"window_attn_skip_freq": None, "num_layers": 2, "window_sink_tokens": 0}
    rows = [row for pairs in EXCLUSIONS.values() for row in pairs if row.said and len(row.other.split()) == 1]
    assert len(rows) > 4
    assert [row.other for row in rows if row.said_by(Namespace(**on, **defaults)) != row.other] == []


def test_flags_named_on_pages_exist() -> None:
    known = set(re.findall(r"--[a-z][\w-]*", flags_page.flags_page() + flags_page.command_page()))
    for script in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        known |= set(re.findall(r'"(--[a-z][\w-]*)"', script.read_text(encoding="utf-8")))
    others = {"--nproc-per-node", "--help", "--version", "--index-url"}
    others |= {"--rdzv-backend", "--master-port", "--master-addr", "--local-addr"}  # torchrun's
    others |= {"--nodes"}  # sbatch's, and below docker's
    others |= {"--target", "--build-arg", "--rm", "--gpus", "--ipc", "--ulimit", "--user", "--shm-size", "--device"}
    others |= {"--network"}
    others |= {"--no-build-isolation", "--no-deps", "--no-index", "--only-binary"}  # pip's
    others |= {"--implementation", "--platform", "--python-version"}
    others |= {"--capture-range", "--capture-range-end"}  # nsys's
    # Megatron-LM's
    others |= {"--sft", "--spec", "--dynamic-context-parallel", "--sequence-packing-scheduler", "--attention-dropout"}
    others |= {"--dist-ckpt-optim-fully-reshardable", "--dist-ckpt-strictness", "--no-save-optim"}
    others |= {"--exit-signal-handler", "--skip-train", "--tensorboard-log-interval"}
    others |= {"--data-args-path", "--train-data-path", "--per-split-data-args-path", "--legacy-tokenizer"}
    others |= {"--eval-global-batch-size", "--use-persistent-ckpt-worker"}
    others |= {"--eod-mask-loss", "--allow-ambiguous-pad-tokens", "--rerun-mode", "--moe-token-dispatcher-type"}
    others |= {"--fim-data", "--split-sentences", "--calculate-per-token-loss"}
    named = 0
    for page in PAGES:
        if page.name in ("planner.md", "LOG.md"):  # commands of other tools
            continue
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
        named += len(flags)
        assert flags <= known | others, f"{page}: {sorted(flags - known - others)}"
    assert named > 100


def test_ranks_of_one_node_meet_at_localhost() -> None:
    """Where nothing resolves the host's own name, torchrun alone waits for minutes."""
    scripts = [*(ROOT / "examples").glob("*.*"), ROOT / "docker" / "entrypoint.sh", *(ROOT / "docs").rglob("*.md")]
    started = [
        f"{path}: {command}"
        for path in scripts
        for command in re.findall(r"(?:torchrun|distributed\.run) -[^`\n]*", path.read_text(encoding="utf-8"))
        if "--nproc-per-node" in command and "--nnodes" not in command
    ]
    assert len(started) > 30
    assert [command for command in started if "--local-addr localhost" not in command] == []


def test_training_commands_for_gpus_fit_an_h100() -> None:
    """Start-up refuses what does not fit; the reader's first command must not end so."""
    looked_at = 0
    for block in BLOCKS:
        for words in commands_of(block) if block.language == "sh" else ():
            if "pretrain_gpt.py" not in words or "gloo" in words or words[0] not in ("torchrun", "docker"):
                continue
            settings = parse_args(words[words.index("pretrain_gpt.py") + 1 :], world_size=8)
            shape = model_shape(settings.model, settings.data.vocab_size or 128256)
            assert planned_runtime.max_tokens_per_rank(settings.planning, shape, load_hardware("h100")) >= 1024, (
                block.name
            )
            looked_at += 1
    assert looked_at >= 3


def test_files_named_on_pages_exist() -> None:
    pattern = r"`((?:dynamic_cp|megatron|tests|benchmarks|examples|tools|docs)/[\w./-]*[\w/])`"
    looked_at = 0
    for page in PAGES:
        for name in re.findall(pattern, page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page}: {name}"
            looked_at += 1
    assert looked_at > 30


MEGATRON = {
    *("transformer_config.py", "transformer_layer.py", "transformer/attention.py", "rope_utils.py", "utils.py"),
    *("dot_product_attention.py", "distributed_data_parallel.py", "multi_token_prediction.py", "mamba_mixer.py"),
    *("multi_latent_attention.py", "extensions/transformer_engine.py", "gated_delta_net.py", "training/arguments.py"),
    *("pretrain_hybrid.py", "pretrain_mamba.py", "router.py"),
}
"""Files of Megatron-LM that pages name."""


def test_a_file_named_on_a_page_is_one_and_where_the_page_says() -> None:
    """`name.py` is one file; of those in the rooms that its paragraph or row names, if it names some."""
    tops = ("dynamic_cp", "megatron", "tests", "benchmarks", "examples", "tools", "docker")
    files = [path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py")]
    looked_at, wrong = 0, []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        if page.name == "LOG.md":  # they tell of files that are gone
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for part in re.split(r"\n\s*\n|\n(?=\|)", text):
            rooms = {name.rstrip("/") for name in re.findall(r"`(\w[\w/]*)`", part) if "/" in name}
            for name in set(re.findall(r"`([\w./-]*\w\.py)\b", part)) - MEGATRON:
                looked_at += 1
                found = [file for file in files if f"/{file}".endswith(f"/{name}")]
                if rooms and "/" not in name:
                    found = [file for file in found if any(f"/{room}/" in f"/{file}" for room in rooms)]
                if len(found) != 1 and not (ROOT / name).is_file():
                    wrong.append((page.name, name, found, rooms))
    assert looked_at > 200
    assert not wrong, wrong


def test_links_as_github_resolves_them() -> None:
    """Pages are read there, too, where a link goes from file to file and an anchor is made of the heading."""
    looked_at = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text)
        links += [(name.partition("#")[0], "") for name in re.findall(r'src(?:set)?="([^"]+)"', text)]
        for target, anchor in links:
            looked_at += 1
            path = page.parent / target if target else page
            assert path.is_file(), f"{page}: {target}"
            if anchor and path.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}
                assert anchor in slugs, f"{page}: {target}#{anchor}"
    assert looked_at > 300


def test_drawings_are_those_of_the_tool(tmp_path: Path) -> None:
    make_drawings.main(["--output", str(tmp_path)])
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(made) >= 10
    assert made == {path.name: path.read_text(encoding="utf-8") for path in make_drawings.DRAWINGS.iterdir()}, (
        "run `python -m tools.make_drawings`"
    )


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings_handlers") is None,
    reason='mkdocs is not installed: pip install -e ".[docs]"',
)
def test_site_builds_strictly(tmp_path: Path) -> None:
    """Links, anchors, pictures, the navigation and the docstrings of the API; nothing is loaded from elsewhere."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', html)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)"', html)
        loaded += re.findall(r'<link[^>]*href="([^"]+)"[^>]*rel="(?:stylesheet|preconnect|icon)"', html)
        assert len(loaded) >= 3
        assert not [one for one in loaded if re.match(r"(https?:)?//", one)], page
    ids = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))) for page in pages}
    looked_at = 0
    for page in pages:  # mkdocs lets dead anchors pass
        for target, anchor in re.findall(r'href="([^":/][^":#]*|)#([^"]+)"', page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve() if target else page
            assert anchor in ids[place] or anchor.startswith("__"), f"{page.name}: {target}#{anchor}"
            looked_at += 1
    assert looked_at > 500
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "plan_global_batch" in api
    assert "fastest legal plan" in api


def test_messages_of_the_faq_are_the_programs() -> None:
    """Fragments of quoted messages (there is an ellipsis where they vary) stand in the sources."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("dynamic_cp", "megatron")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message goes on in the next line
    page = (DOCS / "faq.md").read_text(encoding="utf-8").replace("\n  ", " ")
    quoted = re.findall(r"`([^`\n]*…[^`\n]*)`|(?<!\*)\*(?!\*)([^*\n]*…[^*\n]*)\*", page)
    fragments = {
        fragment.strip(" ,;:.")
        for pair in quoted
        for fragment in re.split(r"…|\bN\b|\bM\b|\d[\d.]*(?: GB)?|tokens: checksum", "".join(pair))
        if len(fragment.strip()) >= 8
    }
    assert len(fragments) >= 15
    missing = sorted(fragment for fragment in fragments if fragment not in sources)
    assert not missing, missing


@pytest.mark.parametrize("name", ["exchange-gains", "loss-chunks", "which-cp-size"])
def test_quoted_figures_are_those_of_today(name: str) -> None:
    """The cheap ones; the night's pieces `figures` compare all."""
    assert not quoted_figures.changes(name), f"run `python -m tools.quoted_figures {name}` and read the difference"


def test_what_is_stale_is_noticed() -> None:
    before = ["0 | lanes 0-3", "1.167 s, +2.0%, CP 8", "Modelled on 2026-11-26."]
    assert quoted_figures.agrees(before, ["0 | lanes 0-3", "1.168 s, +2.1%, CP 8", "Modelled on 2026-11-28."])
    for line in ("1.169 s, +2.0%, CP 8", "1.167 s, +2.0%, CP 16", "1.167 s, +2.0%"):
        assert not quoted_figures.agrees(before, [before[0], line, before[2]]), line


def test_every_mark_names_a_part_and_every_part_has_a_place() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    marks = [mark for text in texts for mark in re.findall(r"<!-- begin quoted figures: (.*) -->", text)]
    names = [re.fullmatch(r"`python -m tools\.quoted_figures ([\w-]+)`", mark) for mark in marks]
    assert {name and name[1] for name in names} == set(quoted_figures.PARTS)
    assert sum(text.count(quoted_figures.END) for text in texts) == len(marks)
    decide = "\n".join(
        quoted_figures.quoted((DOCS / "how-to" / "decide.md").read_text(encoding="utf-8"), "headline", "decide.md")
    )
    verdicts = r"\| (gains|may pay|does not pay|loses) \|"
    for jobs, command in ((quoted_figures.TUNED, "sweep"), (quoted_figures.GIVEN, "simulate")):
        for job in jobs:
            assert re.search(rf"^\| {re.escape(job.name)} \|.*{verdicts}$", decide, re.MULTILINE)
            assert f"\ndynamic-cp {command} {job.words}\n" in decide
