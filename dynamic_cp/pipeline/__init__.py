"""A pipeline: what its stages run, what each operation waits for, and how long all of it takes.

Read in this order: `schedule` lists the operations of a stage and says what each waits for and pays, `longest_path`
times operations in one compiled loop and lets lanes that share experts wait for each other, `timeline` splits the time
of every rank, `simulator` does all of it for a plan.
"""
