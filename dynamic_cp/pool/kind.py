"""The pool as a kind of plan (`plans.extension`)."""

from __future__ import annotations

from dynamic_cp.plans.extension import PlanKind
from dynamic_cp.pool import choice, legal, memory, server_ticks, text

KIND = PlanKind(
    check=legal.check_pool,
    why_illegal=legal.why_not_homed,
    to_dict=text.pool_to_dict,
    from_dict=text.pool_from_dict,
    settings=text.settings,
    lines=text.lines,
    parse=text.parse,
    encode=server_ticks.encode_ticks,
    why_no_timeline=legal.why_no_timeline,
    peak=memory.peak,
    peak_at=memory.peak_at,
    least_at=memory.least_at,
    plan=choice.plan_batch,
)
