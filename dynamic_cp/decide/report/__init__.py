"""Pictures, traces and HTML pages of plans and training runs; imports nothing, as traces need no matplotlib nor jinja2.

Read in this order: `theme` (colours), `drawing` (matplotlib, imported at first use), `gantt` and `cp_map` (pictures of
plans), `curves` (of lengths, lanes and CP sizes), `run` (what a training run writes), `trace` (for Perfetto); then HTML
pages: `templates`, `page` (what all share), `placed_tiles`, `placed` (placed attention), `comparison_page`, `run_page`.
"""
