"""Named workloads: the frozen draws again, what is bundled is what its sources say, and overlong documents."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamic_cp
from dynamic_cp.decide.distribution import describe
from dynamic_cp.decide.workloads import OVERLONG_POLICIES, draw_lengths, longest_length, workload_names, workload_source
from dynamic_cp.errors import DynamicCPError, InvalidInputError
from tests.unit.support import CASES

DATA = Path(dynamic_cp.__file__).parent / "data" / "lengths"
LISTS = json.loads((DATA / "lists.json").read_text())
TABLES = json.loads((DATA / "quantiles.json").read_text())["tables"]
FORMULAS = {"lognormal-cc", "lognormal-github", "sftmix"}


def test_frozen_draws():
    files = sorted((CASES / "lengths").glob("github_*.npy"))
    assert len(files) == 3
    for file in files:
        np.testing.assert_array_equal(draw_lengths("lognormal-github", 2048, 0, 131072), np.load(file))


@pytest.mark.parametrize(
    ("name", "seed", "max_seqlen", "first", "num_tokens", "tokens_squared"),
    [
        ("lognormal-cc", 0, 32_768, [1040, 773, 1879, 1015, 486], 3_401_100, 17_546_990_494),
        ("sftmix", 2, 131_072, [349, 1225, 1217, 495, 473], 9_500_703, 675_981_615_971),
    ],
)
def test_frozen_draws_that_are_not_shipped(name, seed, max_seqlen, first, num_tokens, tokens_squared):
    lengths = draw_lengths(name, 2048, seed, max_seqlen)
    assert lengths[:5].tolist() == first
    assert (int(lengths.sum()), int((lengths**2).sum())) == (num_tokens, tokens_squared)


def test_a_list_in_a_file_is_drawn_like_the_frozen_real_cases(tmp_path):
    listed = np.random.default_rng(5).integers(1, 90_000, 3000).astype(np.uint32)
    np.save(tmp_path / "a.npy", listed)
    expected = np.clip(np.random.default_rng(3).choice(listed, 2048).astype(np.int64), 64, 32_768)
    for path in (tmp_path / "a.npy", str(tmp_path / "a.npy")):
        np.testing.assert_array_equal(draw_lengths(path, 2048, 3, 32_768), expected)


def test_names_and_sources():
    names = workload_names()
    assert set(names) == {*LISTS["lists"], *TABLES, *FORMULAS}
    assert list(names) == sorted(names)
    assert {"github", "github_bal", "repo_dir", "prolong", "wlb", "wikipedia"} <= set(names)
    kinds = {name: workload_source(name).split(":")[0] for name in names}
    assert kinds["github_bal"] == "real"
    assert kinds["video_dit"] == kinds["sftmix"] == kinds["lognormal-cc"] == "synthetic"
    assert kinds["wlb"] == "quantiles of a public list"
    assert "median 1800 tokens, sigma 1.6" in workload_source("lognormal-github")
    with pytest.raises(InvalidInputError, match="is not a workload"):
        workload_source("gihub")


@pytest.mark.parametrize("name", LISTS["lists"])
def test_bundled_lists_stand_for_the_full_ones(name):
    entry = LISTS["lists"][name]
    listed = np.load(DATA / f"{name}.npy")
    full = entry["full_list"]
    assert listed.dtype == np.uint32
    assert len(listed) == entry["num_bundled"] >= 4096
    assert 0.4 * full["max_tokens"] <= listed.max() <= full["max_tokens"]
    assert listed.mean() == pytest.approx(full["num_tokens"] / full["num_samples"], rel=0.01)
    assert entry["kind"] in LISTS["kinds"]
    if isinstance(entry["sources"], dict):
        assert set(entry["sources"]) <= set(LISTS["sources"])
        assert sum(entry["sources"].values()) == full["num_samples"]


def test_nothing_unexplained_is_bundled():
    assert {file.stem for file in DATA.glob("*.npy")} == set(LISTS["lists"])
    readme = (DATA / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in [*LISTS["lists"], *TABLES])
    assert sum(file.stat().st_size for file in DATA.glob("*.npy")) < 256_000


@pytest.mark.parametrize("name", TABLES)
def test_quantile_tables_are_reproduced(name):
    table = TABLES[name]
    percents, tokens = np.array(table["quantiles"]).T
    assert (np.diff(percents) > 0).all()
    assert (np.diff(tokens) > 0).all()
    lengths = draw_lengths(name, 400_000, 0, 2**22, 1)
    assert tokens[0] <= lengths.min() <= lengths.max() <= tokens[-1]
    inner = (percents > 0) & (percents <= 99)
    drawn = np.quantile(lengths, percents[inner] / 100)
    np.testing.assert_allclose(drawn, tokens[inner], rtol=0.05)
    assert lengths.mean() == pytest.approx(table["mean_tokens"], rel=0.12)


def test_the_mean_of_a_lognormal_is_nvidias():
    lengths = draw_lengths("lognormal:mean=1024,sigma=1.5", 1_000_000, 0, 2**31 - 1, 1)
    assert lengths.mean() == pytest.approx(1024, rel=0.03)
    assert np.median(lengths) == pytest.approx(1024 * np.exp(-(1.5**2) / 2), rel=0.01)
    np.testing.assert_array_equal(
        draw_lengths("lognormal:median=1800, sigma=1.6", 100, 7, 65_536),
        draw_lengths("lognormal-github", 100, 7, 65_536),
    )
    clipped = draw_lengths("lognormal:mean=1024,sigma=1.5,min=128,max=8192", 20_000, 0, 10_000, 1)
    assert (clipped.min(), clipped.max()) == (128, 8192)


def test_what_becomes_of_overlong_documents(tmp_path):
    (tmp_path / "a.txt").write_text("100 1000 250")
    draws = {policy: draw_lengths(tmp_path / "a.txt", 3000, 0, 250, 10, policy) for policy in OVERLONG_POLICIES[:3]}
    assert all(set(lengths.tolist()) == {100, 250} for lengths in draws.values())
    share = {policy: float((lengths == 250).mean()) for policy, lengths in draws.items()}
    # Of three documents, two are 250 long when truncated, one of two when dropped, and five of six pieces when split.
    assert share == pytest.approx({"truncate": 2 / 3, "drop": 1 / 2, "split": 5 / 6}, abs=0.03)
    says = r"\d+ of 3000 drawn .* longer than max_seqlen 250, the longest has 1000"
    with pytest.raises(InvalidInputError, match=says):
        draw_lengths(tmp_path / "a.txt", 3000, 0, 250, 10, "error")
    assert draw_lengths(tmp_path / "a.txt", 3000, 0, 1000, 10, "error").max() == 1000
    with pytest.raises(InvalidInputError, match="only 0 of 603000 drawn documents have at most max_seqlen 90 tokens"):
        draw_lengths(tmp_path / "a.txt", 3000, 0, 90, 10, "drop")


def test_pieces_lose_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("700")
    pieces = [tuple(sorted(draw_lengths(tmp_path / "a.txt", 3, seed, 300, 1, "split").tolist())) for seed in range(40)]
    assert set(pieces) == {(300, 300, 300), (100, 300, 300), (100, 100, 300), (100, 100, 100)}
    (tmp_path / "a.txt").write_text("600")
    assert draw_lengths(tmp_path / "a.txt", 3, 0, 300, 1, "split").tolist() == [300] * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("gihub", 4, 0, 128),
            "'gihub' is not a workload .did you mean 'github'.*: use github, github_bal, .*wlb, .*lognormal:mean=1024",
        ),
        (("", 4, 0, 128), "'' is not a workload"),
        (("github", 0, 0, 128), "num_samples is 0, the smallest allowed value is 1"),
        (("github", 4, -1, 128), "seed is -1, the smallest allowed value is 0"),
        (("github", 4, 0, 128, 0), "min_seqlen is 0"),
        (("github", 4, 0, 0), "max_seqlen is 0"),
        (("github", 4, 0, 32), "minimum length is 64 and max_seqlen 32"),
        (("github", 4, 0, 128, 64, "clip"), "overlong is 'clip': use one of truncate, drop, split, error"),
        (("sftmix", 4, 0, 8192), "between 8192 and max_seqlen, which is 8192"),
        (("lognormal:", 4, 0, 128), "'' is unknown or double"),
        (("lognormal:mean=5", 4, 0, 128), "has mean: give sigma, and mean or median"),
        (("lognormal:mean=5,median=5,sigma=1", 4, 0, 128), "give sigma, and mean or median"),
        (("lognormal:mean=x,sigma=1", 4, 0, 128), "mean is 'x', a number is needed"),
        (("lognormal:mean=nan,sigma=1", 4, 0, 128), "mean or median is nan and sigma 1.0"),
        (("lognormal:mean=0,sigma=1", 4, 0, 128), "mean or median is 0.0"),
        (("lognormal:mean=9,sigma=-1", 4, 0, 128), "sigma -1.0"),
        (("lognormal:mean=9,sigma=1,sigma=2", 4, 0, 128), "'sigma=2' is unknown or double"),
        (("lognormal:mean=9,sigma=1,min=9,max=8", 4, 0, 128), "min is 9.0 and max 8.0"),
        (("lognormal:mean=9,sigma=1,min=nan", 4, 0, 128), "min is nan"),
        (("lognormal:mean=9,sigma=1,max=8.5", 4, 0, 128), "min and max are whole tokens"),
        (("lognormal:mean=9,sigma=1,max=inf", 4, 0, 128), "max inf"),
        (("lognormal:mean=9,sigma=1,min=200", 4, 0, 128), "minimum length is 200 and max_seqlen 128"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InvalidInputError, match=says):
        draw_lengths(*arguments)


@settings(max_examples=200)
@given(spec=st.text(alphabet="meansigdx=,.0123456789-+einf \n", max_size=40), seed=st.integers(0, 2**70))
def test_any_lognormal_text_draws_or_explains(spec, seed):
    try:
        lengths = draw_lengths(f"lognormal:{spec}", 5, seed, 4096)
    except DynamicCPError:
        return
    assert lengths.min() >= 1
    assert lengths.max() <= 4096


@settings(max_examples=100)
@given(
    name=st.sampled_from(workload_names()), num_samples=st.integers(1, 300), seed=st.integers(0, 2**32),
    max_seqlen=st.integers(8193, 2**21), min_seqlen=st.integers(1, 8193),
    overlong=st.sampled_from(["truncate", "drop", "split"]),
)  # fmt: skip
def test_any_draw_has_its_size_and_limits(name, num_samples, seed, max_seqlen, min_seqlen, overlong):
    lengths = draw_lengths(name, num_samples, seed, max_seqlen, min_seqlen, overlong)
    assert lengths.shape == (num_samples,)
    assert lengths.dtype == np.int64
    assert min_seqlen <= lengths.min() <= lengths.max() <= max_seqlen
    again = draw_lengths(name, num_samples, seed, max_seqlen, min_seqlen, overlong)
    np.testing.assert_array_equal(lengths, again)


def test_summary_of_a_small_list():
    summary = describe([8192, 1, 8193, 40_000])
    assert (summary.num_samples, summary.num_tokens, summary.mean_tokens) == (4, 56_386, 14_096.5)
    assert dict(summary.quantiles_tokens) == {
        0.0: 1, 1.0: 1, 10.0: 1, 50.0: 8192, 90.0: 40_000, 99.0: 40_000, 99.9: 40_000, 100.0: 40_000,
    }  # fmt: skip
    squares = 8192**2 + 1 + 8193**2 + 40_000**2
    beyond_8k, beyond_32k, beyond_128k = summary.tails
    assert beyond_8k.longer_than_tokens == 8192
    assert beyond_8k.samples == 0.5
    assert beyond_8k.tokens == pytest.approx(48_193 / 56_386)
    assert beyond_8k.tokens_squared == pytest.approx((8193**2 + 40_000**2) / squares)
    assert beyond_32k.samples == 0.25
    assert (beyond_128k.samples, beyond_128k.tokens, beyond_128k.tokens_squared) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("lengths", [[], [0], [1.5], [[1]], [-3], ["a"], np.array(5)])
def test_what_cannot_be_summed_up(lengths):
    with pytest.raises(InvalidInputError, match="cannot describe"):
        describe(lengths)


@pytest.mark.parametrize(
    "name", [*workload_names(), "lognormal:mean=2000,sigma=0", "lognormal:mean=900,sigma=2,max=5000"]
)
@pytest.mark.parametrize("max_seqlen", [10_000, 131_072])
def test_the_longest_sample_is_that_of_all_draws(name, max_seqlen):
    longest = longest_length(name, max_seqlen)
    drawn = max(int(draw_lengths(name, 2048, seed, max_seqlen).max()) for seed in range(3))
    assert drawn <= longest <= max_seqlen
    if name in LISTS["lists"]:
        assert longest == min(int(np.load(DATA / f"{name}.npy").max()), max_seqlen)


def test_the_longest_sample_of_a_file(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, 90, 400, 1022]))
    expected = {("truncate", 5000): 1022, ("truncate", 500): 500, ("split", 500): 500, ("drop", 500): 400}
    expected |= {("drop", 5000): 1022, ("error", 5000): 1022, ("truncate", 20): 20}
    for (overlong, max_seqlen), longest in expected.items():
        assert longest_length(tmp_path / "a.npy", max_seqlen, 1, overlong) == longest, (overlong, max_seqlen)
    assert longest_length(tmp_path / "a.npy", 5000, 2000) == 2000
