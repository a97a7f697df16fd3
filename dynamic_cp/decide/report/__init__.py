"""Pictures, traces and HTML pages of plans and training runs.

Nothing is imported here: a trace needs neither matplotlib nor jinja2. Read in this order:

- `theme` (colours), `drawing` (matplotlib, imported at first use)
- pictures of plans: `gantt` (of a pool, too), `cp_map`; of lengths, lanes and CP sizes: `curves`
- `run`: what a training run writes
- `trace`: for Perfetto, of simulated iterations and of what ranks wrote down
- HTML pages: `templates`, `page` (what all share), `placed_tiles` and `placed` (the part about placed attention),
  `comparison_page`, `run_page` (a training run)
"""
