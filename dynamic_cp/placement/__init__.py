"""Which lane holds which tokens of a micro-batch, and which lane computes which tile of its attention.

A sample is cut into *homes*, each on one lane; a *tile* is the attention of the queries of one home to the keys of one.
Homes even out tokens, tiles even out work, and both keep traffic low: queries and outputs (a *row*) or keys and values
(a *column*) travel once to each node and lane that needs them. Read in this order:

- `runs`: masks as runs of rows, and how many pairs lie between two stretches of a sample
- `legal`: whether a placement computes what masks allow, once, and nothing else
- `transport`: what lanes fetch and give back, over which link and which relays, and in which division
- `divisions`: when the inputs of tiles arrive, and which division computes them
- `cuts`: homes cut to the parts that are used, or shared by lanes; layers with a window on homes of layers without
- `sent`: bytes that lanes send each other, and how long programmes take
- `programme`: what each lane does, as plain data that travels to it
- `token_graph`: a micro-batch as a graph of blocks and tiles, and where a search begins
- `row_search`: moves blocks with all tiles of their queries
- `tile_search`: moves tiles by rows and columns
- `placed`: evens out tokens, and writes the result as arrays
- `portfolio`: the ways to place by name, over nodes and then over lanes, and the candidates of a micro-batch
"""
