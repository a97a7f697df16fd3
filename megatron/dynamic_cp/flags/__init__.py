"""The flags of dynamic context parallelism, and what follows from them.

Read in this order: `windows` (which layers have which), `arguments` (flags, and what is refused), `settings` (frozen
values), `exchange_sizes` (CP sizes that exchanges can serve).
"""
