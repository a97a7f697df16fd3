"""Which checkout a script belongs to, and the table of what is replaced there: complete, and true of a real one."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.repairs import releases
from megatron.integrations.lm_adaptor import checkout, hooks, model, replacements
from megatron.integrations.lm_adaptor.checkout import NEEDED, SUPPORTED_VERSIONS, open_checkout, put_first
from megatron.integrations.lm_adaptor.replacements import REPLACEMENTS, SCRIPT

SCHEDULER = "class DefaultDynamicCPScheduler:\n    pass\n"
PACKAGE_INFO = 'MAJOR = 0\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = "{pre}"\nVERSION = (MAJOR, MINOR)\n'


def make_tree(root: Path, minor: int = 16, patch: int = 1, pre: str = "", schedules: str | None = None) -> Path:
    """Return the script of a tree with the files that are looked at."""
    (root / "megatron" / "training").mkdir(parents=True)
    datasets = root / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True)
    info = PACKAGE_INFO.format(minor=minor, patch=patch, pre=pre)
    (root / "megatron" / "core" / "package_info.py").write_text(info)
    if schedules is not None:
        (datasets / "data_schedule.py").write_text(schedules)
    script = root / "pretrain_gpt.py"
    script.write_text("raise SystemExit('the script ran')\n")
    return script


def make_importable_tree(root: Path, minor: int = 16, patch: int = 1) -> Path:
    """Return the script of a tree with empty packages."""
    script = make_tree(root, minor, patch)
    for package in ("core", "core/transformer", "core/transformer/custom_layers", "training"):
        (root / "megatron" / package).mkdir(exist_ok=True)
        (root / "megatron" / package / "__init__.py").write_text("")
    (root / "megatron/core/transformer/custom_layers/batch_invariant_kernels.py").write_text("")
    return script


def test_version_is_read_without_importing(tmp_path: Path) -> None:
    checkout = open_checkout(make_tree(tmp_path))
    assert (checkout.root, checkout.version, checkout.takes_schedulers) == (tmp_path, "0.16.1", False)


@pytest.mark.parametrize("annotation", ["", ": Dict[str, type]"])
def test_newer_checkout_with_a_table_of_schedulers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotation: str
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    script = make_tree(tmp_path, minor=19, patch=0, schedules=f"scheduler_map{annotation} = {{}}\n{SCHEDULER}")
    assert open_checkout(script).takes_schedulers


@pytest.mark.parametrize(
    ("minor", "patch", "pre", "schedules", "nearest"),
    [
        (15, 0, "", None, "0.16.1"), (16, 1, "rc0", None, "0.16.1"), (17, 0, "", None, "0.17.1"),
        (18, 3, "", None, "0.18.2"), (19, 0, "", "x = 1\n", "0.19.1"),
        (21, 0, "", "scheduler_map = {}\n", "0.20.0"),  # schedulers that know one CP size, as those of branch main
    ],
)  # fmt: skip
def test_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int, patch: int, pre: str, schedules: str | None,
    nearest: str,
) -> None:  # fmt: skip
    script = make_tree(tmp_path, minor, patch, pre, schedules)
    says = f"is version 0.{minor}.{patch}{pre}; supported are 0.16.1"
    with pytest.raises(UnsupportedFeatureError, match=says) as caught:
        open_checkout(script)
    assert "0.19.1, tried at core_v0.19.0" in str(caught.value)
    assert "0.20.0, tried at d98e8a64 (branch main of 2026-08-22)" in str(caught.value)
    for python, more in ((12, ""), (11, "" if nearest == "0.16.1" else " and take Python 3.12, or core_v0.16.1")):
        monkeypatch.setattr(sys, "version_info", (3, python, 1))
        with pytest.raises(UnsupportedFeatureError) as caught:
            open_checkout(script)
        assert str(caught.value).endswith(f"(branch dev): check out {SUPPORTED_VERSIONS[nearest]}{more}")


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_supported_versions_and_the_python_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    _, minor, patch = map(int, version.split("."))
    script = make_tree(tmp_path, minor, patch)
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert open_checkout(script).version == version
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    if version == "0.16.1":
        assert open_checkout(script).version == version
        return
    says = f"is version {version}, which needs Python 3.12 or newer"
    with pytest.raises(UnsupportedFeatureError, match=says) as caught:
        open_checkout(script)
    assert "install this project with its extras train and megatron-lm for Python 3.12" in str(caught.value)
    assert str(caught.value).endswith("or check out core_v0.16.1")


def test_newest_releases_can_be_checked_out() -> None:
    assert {release.version for release in releases.RELEASES} <= set(SUPPORTED_VERSIONS)


def test_script_outside_a_checkout(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with pytest.raises(InvalidInputError, match="does not exist"):
        open_checkout(script)
    script.write_text("")
    with pytest.raises(InvalidInputError, match="not inside a Megatron-LM checkout"):
        open_checkout(script)


def test_package_info_of_another_kind(tmp_path: Path) -> None:
    script = make_tree(tmp_path)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text('__version__ = "1"\n')
    with pytest.raises(UnsupportedFeatureError, match="does not say MAJOR"):
        open_checkout(script)


def test_regular_package_cannot_be_added_to(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "megatron" / "__init__.py").write_text("")
    with pytest.raises(InvalidInputError, match="no other package can add to `megatron`"):
        put_first(tmp_path)


def test_megatron_core_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    import megatron.core  # noqa: F401  # the installed one

    make_tree(tmp_path)
    before = list(sys.path)
    with pytest.raises(InvalidInputError, match=r"megatron.core was imported from .* before the checkout"):
        put_first(tmp_path)
    assert sys.path == before


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "megatron.dynamic_cp.run", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_line_answers_in_one_line(tmp_path: Path) -> None:
    missing, old = run(), run(str(make_tree(tmp_path, minor=14)))
    assert (missing.returncode, old.returncode) == (2, 2)
    assert missing.stderr.startswith("error: give the script first: python -m")
    assert "is version 0.14.1" in old.stderr
    assert old.stderr.count("\n") == 1


def test_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path) -> None:
    """In one line, before anything of the run begins."""
    script = make_importable_tree(tmp_path)
    training = tmp_path / "megatron/training/__init__.py"
    training.write_text("import sys\nsys.modules['six'] = None\nimport six\n")
    done = run(str(script))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the training code of Megatron-LM needs six")
    assert "not installed here: install the extra megatron-lm of this project, pip install -e '.[megatron-lm]'" in (
        done.stderr
    )
    training.write_text("import a_package_of_nobody\n")
    other = run(str(script))
    assert other.returncode == 1
    assert "No module named 'a_package_of_nobody'" in other.stderr


def test_the_extra_has_what_the_training_code_needs() -> None:
    setup = ast.parse((Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8"))
    extras = {node.targets[0].id: node.value for node in setup.body if isinstance(node, ast.Assign)}  # type: ignore
    assert sorted(ast.literal_eval(extras["MEGATRON_LM"])) == sorted(NEEDED.values())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="newer checkouts need Python 3.12")
def test_a_version_without_a_tag_says_what_was_tried(tmp_path: Path) -> None:
    done = run(str(make_importable_tree(tmp_path, minor=20, patch=0)))
    assert done.returncode == 2
    assert "say that they are 0.20.0; tried was d98e8a64 (branch main of 2026-08-22)" in done.stderr


def test_missing_symbol_is_named(tmp_path: Path) -> None:
    """A tree of the right version whose training code lacks everything: the first symbol of the table is named."""
    script = make_importable_tree(tmp_path)
    done = run(str(script))
    assert done.returncode == 2, done.stderr
    assert (
        "Megatron-LM checkout has no megatron.training.pretrain, which is replaced (Exchange the script's get_batch"
        in done.stderr
    )
    assert "the script ran" not in done.stderr + done.stdout


SHOW_REPLACED = """
import importlib, sys
from pathlib import Path
from megatron.integrations.lm_adaptor.replacements import activate
from megatron.integrations.lm_adaptor.checkout import open_checkout
from megatron.integrations.lm_adaptor.replacements import SCRIPT, replaced_in
root = Path(sys.argv[1])
found = open_checkout(root / "pretrain_gpt.py")
activate(found)
script = (root / "pretrain_gpt.py").read_text()
for one in replaced_in(found.version):
    if one.module == SCRIPT:
        assert f" {one.symbol}(" in script, one
        continue
    module = importlib.import_module(one.module)
    assert Path(module.__file__).is_relative_to(root), module.__file__
    now = getattr(module, one.symbol)
    ours = getattr(now, "func", now)
    assert ours.__module__.startswith("megatron.integrations.lm_adaptor"), (one, ours)
    print("replaced", one.where)
import megatron.training, megatron.training.training
assert megatron.training.pretrain is megatron.training.training.pretrain
"""


def test_every_function_has_its_row_and_says_why() -> None:
    defined = {one for one in vars(hooks).values() if inspect.isfunction(one) and one.__module__ == hooks.__name__}
    assert {one for one in defined if not one.__name__.startswith("_")} == {one.ours for one in REPLACEMENTS}
    assert all(one.ours.__doc__ for one in REPLACEMENTS)
    rows = {(one.where, one.since, one.until) for one in REPLACEMENTS}
    assert len(rows) == len(REPLACEMENTS) == 40


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_a_symbol_is_replaced_once_in_each_release(version: str) -> None:
    """Twice would wrap ours in ours."""
    here = replacements.replaced_in(version)
    assert len({one.where for one in here}) == len(here)
    assert {one.symbol for one in here} >= {"parse_args", "validate_args", "GPTModel", "get_batch"}
    assert ("PackedSeqParams" in {one.symbol for one in here}) == (version >= "0.18")
    in_models = [one.symbol for one in here if one.module.startswith("megatron.training.models")]
    assert (in_models != []) == (version >= "0.19"), "before, models are built without a configuration"


def test_fields_that_may_differ_exist() -> None:
    """A name that megatron-core does not have would allow nothing, silently."""
    from dataclasses import fields

    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    assert known >= model.NO_EFFECT
    assert (known >= model.NUM_WEIGHT_SHARDS) == checkout.WEIGHT_SHARDS.here


def test_missing_package_of_megatron_lm_is_not_taken_for_a_missing_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'six'", name="six")

    monkeypatch.setattr(replacements.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="six"):
        replacements.find(REPLACEMENTS[0])


def test_a_real_checkout_has_every_symbol(checkout: str, version: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SHOW_REPLACED, checkout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    here = [one for one in replacements.replaced_in(version) if one.module != SCRIPT]
    assert done.stdout.count("replaced") == len(here) > 20
