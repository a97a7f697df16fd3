"""A pipeline: what its stages run, what each operation waits for, and how long all of it takes.

Read `graph` first: it alone knows what an operation waits for and which stage pays embedding and head.
"""
