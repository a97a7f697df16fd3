"""Pictures, traces and HTML pages of plans and training runs.

Nothing is imported here: a trace needs neither matplotlib nor jinja2. Read in this order:

- `theme` (colours), `files` (written whole or not at all), `drawing` (matplotlib, imported at first use)
- one file per picture: `gantt`, `tick_gantt`, `cp_map`, `lengths_picture`, `imbalance`, `knee`, `placed_tiles`,
  `placed_links`
- traces for Perfetto: `trace_format`, `measured` (what ranks wrote down), `trace` (simulated iterations),
  `tick_trace` (those of a pool)
- what a training run writes: `run`, and its pictures: `run_pictures`
- HTML pages: `templates`, `page` (what all share), `placed_section`, `html` (a comparison), `run_html` (a training run)
"""
