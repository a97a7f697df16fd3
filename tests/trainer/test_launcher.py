"""What a launcher says, or says wrongly, and what happens when ranks do not meet."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from dynamic_cp.errors import DynamicCPError, InvalidInputError
from megatron.trainer.ending import exits
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup.initialize import join
from tests.trainer.commandline import command_line

VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29755"}


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "", "RANK is '', a number is needed"),
        ("RANK", "2", "RANK is 2, WORLD_SIZE 2: ranks count from 0"),
        ("RANK", None, "RANK not set for 2 ranks: start the job with torchrun"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http', a number up to 65535"),
        ("MASTER_PORT", "99999", "MASTER_PORT is '99999', a number up to 65535"),
        ("MASTER_ADDR", None, "MASTER_ADDR not set for 2 ranks"),
        ("MASTER_ADDR", "nowhere.invalid", "MASTER_ADDR is 'nowhere.invalid', which the host of rank 0"),
        ("MASTER_ADDR", "a..b", "start one node with torchrun --local-addr localhost"),
    ],
)
def test_what_a_launcher_sets_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, said: str
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError) as raised:
        join("gloo", 2, timedelta(seconds=1))
    assert said in str(raised.value)
    assert exits.global_rank() in (0, 2), "it can be told"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_number_of_ranks_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2x")
    with pytest.raises(InvalidInputError, match=f"{name} is '2x', a number is needed"):
        parse_args(command_line("--mock-data --dynamic-cp --max-seqlen-per-dp-cp-rank 128"))


def test_tp_groups_that_would_cross_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    with pytest.raises(InvalidInputError, match=r"\(LOCAL_WORLD_SIZE\) 7 is not a multiple of --tensor.* 2: some TP"):
        parse_args(command_line("--mock-data --tensor-model-parallel-size 2"), 14)
    assert parse_args(command_line("--mock-data"), 14).planning.topology.ranks_per_node == 7


def test_a_port_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InvalidInputError) as raised:
            join("gloo", 2, timedelta(seconds=1))
    said = str(raised.value)
    assert f"port {port} (MASTER_PORT) on rank 0's host 127.0.0.1 is in use by another program" in said
    assert "choose a free one" in said
    assert "\n" not in said
    assert not dist.is_initialized()


def test_a_rank_that_nobody_joins_says_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(DynamicCPError) as raised:
        join("gloo", 2, timedelta(seconds=1))
    said = str(raised.value)
    assert said.startswith(
        f"rank 0 of 2 did not meet the others at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) within 1 s"
    )
    assert "1/2 clients joined" in said
    assert "\n" not in said
    assert "--distributed-timeout-minutes" in said
