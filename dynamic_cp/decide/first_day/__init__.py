"""`dynamic-cp first-day`: what a node's first hour shows, part by part, each in processes of its own.

Read in this order:

- `day`: the job that the parts share; their commands, what each leaves behind, which of them are still to be run
- `page`: predicted beside measured
- `command`: the options
"""
