"""A pipeline: what its stages run, what each operation waits for, and how long all of it takes.

Read in this order: `schedule` (operations of a stage, what each waits for and pays), `longest_path` (times operations
in one compiled loop; lanes that share experts wait for each other), `timeline` (splits the time of every rank),
`simulator` (does all of it for a plan).
"""
