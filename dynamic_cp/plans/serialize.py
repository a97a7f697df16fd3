"""Plans as JSON (for programs and ranks), as text (for people and goldens) and as a digest (for comparing ranks).

    loads(dumps(plan)) == plan == parse_plan(format_plan(plan))

Loading checks only the form; `dynamic_cp.plans.validate.check_plan` says whether a plan is legal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.json_text import in_words, is_kind, parse_json, value_in_words
from dynamic_cp.plans.extension import kind_in_json, kind_in_text, kind_named, kind_of
from dynamic_cp.types import (
    STATE_EXCHANGES,
    TRAITS,
    Attention,
    Bucket,
    CpCommType,
    MicroBatch,
    Plan,
    Sample,
    StateExchange,
    Topology,
    is_placed,
    parse_mask,
    parse_placement,
)

SCHEMA_VERSION = 1
_UNUSED = {"all_lanes_coupled": False}
"""A field of topologies that nothing ever used: plans still carry it, so that their digests stay."""


_NEWER = {"ep_size": 1, "token_alignment": 1}
"""Fields of topologies with the defaults at which plans leave them out, so that digests stay what they were before."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    kind = kind_of(plan)
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": plan.policy,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        "topology": topology_to_dict(plan.topology),
        "micro_batches": [[_bucket_to_dict(bucket) for bucket in mb.buckets] for mb in plan.micro_batches],
        **({} if kind is None or plan.extension is None else {plan.extension.kind: kind.to_dict(plan)}),
    }


def plan_from_dict(data: object) -> Plan:
    """Return the plan that `plan_to_dict` made `data` from; InvalidInputError names the first thing that is wrong."""
    if isinstance(data, Mapping):  # `plan --output` also says which version of this package wrote it
        data = {name: value for name, value in data.items() if name != "version"}
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if version is not None and version != SCHEMA_VERSION:
        raise InvalidInputError(
            f"the plan has schema_version {version!r}, this program reads {SCHEMA_VERSION}: use the version of "
            "dynamic_cp that wrote it"
        )
    names: tuple[str, ...] = ("schema_version", "policy", "max_tokens_per_rank", "topology", "micro_batches")
    kind = kind_in_json(data) if isinstance(data, Mapping) else None
    plan = Fields(data, "plan", (*names, kind) if kind else names)
    plan.get("schema_version", int)
    return Plan(
        topology=topology_from_dict(plan.get("topology", dict)),
        max_tokens_per_rank=plan.get("max_tokens_per_rank", int),
        policy=plan.get("policy", str),
        micro_batches=tuple(
            MicroBatch(
                buckets=tuple(
                    _bucket_from_dict(bucket, f"micro_batches[{i}][{j}]")
                    for j, bucket in enumerate(checked(row, list, f"micro_batches[{i}]"))
                )
            )
            for i, row in enumerate(plan.get("micro_batches", list))
        ),
        extension=kind_named(kind).from_dict(plan.get(kind, dict)) if kind else None,
    )


def topology_to_dict(topology: Topology) -> dict[str, Any]:
    """Return `topology` as JSON's types."""
    values = asdict(topology)
    for name, default in _NEWER.items():
        if values[name] == default:
            del values[name]
    return {**values, **_UNUSED}


def topology_from_dict(data: object) -> Topology:
    """Return the topology that `topology_to_dict` made `data` from; InvalidInputError names what is wrong."""
    given = checked(data, dict, "topology")
    kinds = {
        field.name: bool if field.name == "sequence_parallel" else int
        for field in fields(Topology)
        if field.name not in _NEWER or field.name in given
    }
    topology = Fields(given, "topology", (*kinds, *_UNUSED))
    for name in _UNUSED:
        topology.get(name, bool)
    return Topology(**{name: topology.get(name, kind) for name, kind in kinds.items()})


def dumps(plan: Plan) -> str:
    """Return `plan` as canonical JSON: equal plans give equal text."""
    return json.dumps(plan_to_dict(plan), sort_keys=True, separators=(",", ":"))


def format_cp_sizes(histogram: Mapping[int, int]) -> str:
    """Return how many buckets of each CP size there are, such as `cp2×4 cp4×1` for four of size 2 and one of size 4."""
    return " ".join(f"cp{cp_size}×{count}" for cp_size, count in sorted(histogram.items()))


def loads(text: str | bytes) -> Plan:
    """Return the plan that `dumps` wrote; InvalidInputError if `text` is not one."""
    return plan_from_dict(parse_json("the plan", text, "give a file that `plan --output` wrote"))


def digest(plan: Plan) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of `plan`: ranks compare it instead of the plan."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()


def format_plan(plan: Plan, *, placements: bool = True) -> str:
    """Return `plan` as text: one line of settings, then one line per micro-batch.

    Example (sample_id:seqlen, with @mask if a sample has its own; "-" is an empty place; an exchange other than p2p is
    named, as in "a2a+p2p/8" with the inner size unless the exchange implies it; a placement follows):

        plan v1 policy=dynamic max_tokens_per_rank=64 num_lanes=4 tp_size=1 pp_size=1 vp_size=1 ranks_per_node=8 ...
        0 | lanes 0-1: 7:100 3:9 | lane 2: 5:60 | lane 3: - |
        1 | lanes 0-3 blocks 0.0.40.0,0.40.100.3/0.0.0.0,1.0.3.1,1.1.3.0: 8:100 |
        2 | lanes 0-3 a2a states: 9:4000 |

    In the last line layers with linear attention pass on states; without a word they exchange heads. A plan of a kind
    (`plans.extension`) has more settings in its first line, and more lines: with a pool tile_tokens (and relay_servers,
    if not 0), and a line of tasks for each tick. With model chunks (vp_size > 1), equal tasks are written once, and
    other ticks name the first:

        F0 | 0.0.40.0.0.0,0.40.64.1.3.0
        F5 | F1

    Args:
        placements: whole, so that `parse_plan` reads them; False: only their size, for people, as in "lanes 0-3 blocks
            (2 homes, 3 tiles, 2 divisions): 8:100"; so are lines of a kind.
    """
    kind = kind_of(plan)
    settings = {
        "policy": plan.policy,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        **({} if kind is None else kind.settings(plan)),
        **topology_to_dict(plan.topology),
    }
    lines = [f"plan v{SCHEMA_VERSION} " + " ".join(f"{name}={value}" for name, value in settings.items())]
    for index, micro_batch in enumerate(plan.micro_batches):
        buckets = "".join(f" {_format_bucket(bucket, placements)} |" for bucket in micro_batch.buckets)
        lines.append(f"{index} |{buckets}")
    if kind is not None:
        lines += kind.lines(plan, placements)
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """Return the plan that `format_plan` printed; InvalidInputError names the first wrong line."""
    header, *rows = text.strip().splitlines() or [""]
    match = re.fullmatch(r"plan v(\d+)((?: \w+=\S*)*)", header)
    if match is None:
        raise InvalidInputError(f"line 1 is {header[:60]!r}: a plan starts with 'plan v{SCHEMA_VERSION} policy=...'")
    settings: dict[str, Any] = dict(item.split("=", 1) for item in match[2].split())
    policy = settings.pop("policy", None)
    typed = {
        name: value == "True" if value in ("True", "False") else int(value) if value.isdecimal() else value
        for name, value in settings.items()
    }
    kind, extension = kind_in_text(typed), dict[str, Any]()
    if kind is not None:
        rows, extension[kind] = kind_named(kind).parse(typed, rows)
    return plan_from_dict(
        {
            "schema_version": int(match[1]),
            "policy": policy,
            "max_tokens_per_rank": typed.pop("max_tokens_per_rank", None),
            "topology": typed,
            "micro_batches": [_parse_row(row, index) for index, row in enumerate(rows)],
            **extension,
        }
    )


def _bucket_to_dict(bucket: Bucket) -> dict[str, Any]:
    data: dict[str, Any] = {
        "first_lane": bucket.first_lane,
        "cp_size": bucket.cp_size,
        "cp_comm_type": bucket.cp_comm_type,
        "samples": [sample_to_list(sample) for sample in bucket.samples],
    }
    if bucket.attention.chooses_inner_size:
        data["inner_cp_size"] = bucket.inner_cp_size
    if bucket.placement is not None:
        data["placement"] = str(bucket.placement)
    if bucket.state_exchange != STATE_EXCHANGES[0]:
        data["state_exchange"] = bucket.state_exchange
    return data


_NAMES_INNER_SIZE = [name for name, traits in TRAITS.items() if traits.inner == "chosen"]


def _bucket_from_dict(data: object, where: str) -> Bucket:
    names: tuple[str, ...] = ("first_lane", "cp_size", "cp_comm_type", "samples")
    given = data if isinstance(data, dict) else {}
    # The others imply it, but may say it, too.
    has_inner = given.get("cp_comm_type") in _NAMES_INNER_SIZE or "inner_cp_size" in given
    has_placement = given.get("cp_comm_type") in [name for name in TRAITS if is_placed(name)]
    has_exchange = "state_exchange" in given
    names += ("inner_cp_size",) * has_inner + ("placement",) * has_placement + ("state_exchange",) * has_exchange
    bucket = Fields(data, where, names)
    return Bucket(
        first_lane=bucket.get("first_lane", int),
        cp_size=bucket.get("cp_size", int),
        cp_comm_type=cast(CpCommType, bucket.get("cp_comm_type", str)),
        inner_cp_size=bucket.get("inner_cp_size", int) if has_inner else 1,
        placement=parse_placement(bucket.get("placement", str)) if has_placement else None,
        state_exchange=cast(StateExchange, bucket.get("state_exchange", str)) if has_exchange else STATE_EXCHANGES[0],
        samples=tuple(
            sample_from_list(one, f"{where}.samples[{index}]") for index, one in enumerate(bucket.get("samples", list))
        ),
    )


def sample_to_list(sample: Sample) -> list[int | str]:
    """Return `sample` as JSON's types."""
    return [sample.sample_id, sample.seqlen, *([] if sample.mask is None else [str(sample.mask)])]


def sample_from_list(data: object, where: str) -> Sample:
    """Return the sample that `sample_to_list` made `data` from; InvalidInputError says what is wrong with `where`."""
    if len(checked(data, list, where)) not in (2, 3):
        raise InvalidInputError(
            f"{where} has {len(cast(list[object], data))} entries, 2 or 3 are needed: [sample_id, seqlen, mask]"
        )
    sample_id, seqlen, *mask = cast(list[object], data)
    return Sample(
        sample_id=checked(sample_id, int, where),
        seqlen=checked(seqlen, int, where),
        mask=parse_mask(checked(mask[0], str, where)) if mask else None,
    )


def _format_bucket(bucket: Bucket, placements: bool) -> str:
    lanes = (
        f"lane {bucket.first_lane}"
        if bucket.cp_size == 1
        else f"lanes {bucket.first_lane}-{bucket.first_lane + bucket.cp_size - 1}"
    )
    exchange = "" if bucket.attention == Attention() else f" {bucket.attention}"
    if bucket.placement is not None:
        exchange += f" {bucket.placement}" if placements else f" ({bucket.placement.describe()})"
    if bucket.state_exchange != STATE_EXCHANGES[0]:
        exchange += f" {bucket.state_exchange}"
    samples = " ".join(map(format_sample, bucket.samples)) or "-"
    return f"{lanes}{exchange}: {samples}"


def format_sample(sample: Sample) -> str:
    """Return `sample` as in the text of a plan."""
    return f"{sample.sample_id}:{sample.seqlen}" + ("" if sample.mask is None else f"@{sample.mask}")


_SAMPLE = r"-?\d+:\d+(?:@[^\s|]+)?"
_STATES = "|".join(STATE_EXCHANGES)
_EXCHANGE = rf"(?: (?!(?:{_STATES}):)([^\s:/]+)(?:/(\d+))?)?(?: (\d+\.[^\s|]+))?(?: ({_STATES}))?"
_BUCKET = re.compile(rf"lanes? (\d+)(?:-(\d+))?{_EXCHANGE}: (-|{_SAMPLE}(?: {_SAMPLE})*)")


def _parse_row(row: str, index: int) -> list[dict[str, Any]]:
    number, _, cells = row.partition("|")
    buckets = []
    for cell in cells.rstrip().removesuffix("|").split("|"):
        match = _BUCKET.fullmatch(cell.strip())
        if match is None or number.strip() != str(index):
            raise InvalidInputError(
                f"line {index + 2} is {row[:60]!r}: micro-batch {index} looks like "
                f"'{index} | lanes 0-1: 7:100 3:9 | lane 2: - |' (sample_id:seqlen)"
            )
        first_lane, last_lane, cp_comm_type, inner_cp_size, placement, state_exchange, samples = match.groups()
        buckets.append(
            {
                **({"inner_cp_size": int(inner_cp_size)} if inner_cp_size else {}),
                **({"placement": placement} if placement else {}),
                **({"state_exchange": state_exchange} if state_exchange else {}),
                "first_lane": int(first_lane),
                "cp_size": int(last_lane or first_lane) - int(first_lane) + 1,
                "cp_comm_type": cp_comm_type or Attention().cp_comm_type,
                "samples": [] if samples == "-" else [parse_sample(one) for one in samples.split()],
            }
        )
    return buckets


def parse_sample(text: str) -> list[int | str]:
    numbers, _, mask = text.partition("@")
    return [*map(int, numbers.split(":")), *([mask] if mask else [])]


def checked(value: object, kind: type, where: str) -> Any:
    """Return `value` if it is a `kind` (True is no int); InvalidInputError otherwise."""
    if not is_kind(value, kind):
        raise InvalidInputError(f"{where} is {value_in_words(value)}, {in_words(kind)} is needed")
    return value


class Fields:
    """The entries of a JSON object that must have exactly `names`."""

    def __init__(self, data: object, where: str, names: tuple[str, ...]) -> None:
        self.data, self.where, self.names = checked(data, dict, where), where, names
        if missing := [name for name in names if name not in self.data]:
            raise InvalidInputError(
                f"{where} lacks {', '.join(missing)}: give a file that `plan --output` wrote (--json is more)"
            )
        if unknown := sorted(str(name) for name in self.data if name not in names):
            raise InvalidInputError(f"{where} has unknown entries {', '.join(unknown)}: it needs {', '.join(names)}")

    def get(self, name: str, kind: type) -> Any:
        """Return an entry; InvalidInputError if it is no `kind`."""
        return checked(self.data[name], kind, f"{self.where}.{name}")
