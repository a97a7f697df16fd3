"""Pictures, traces and HTML pages of plans and training runs.

Read in this order: `theme` (colours), `drawing` (matplotlib, imported at first use), one file per picture (`gantt`,
`cp_map`, `lengths_picture`, `imbalance`, `knee`, `run_pictures`), `trace` (Chrome and Perfetto JSON), `run` (what a
training run writes), `html` (the pages). Nothing is imported here: a trace needs neither matplotlib nor jinja2.
"""
