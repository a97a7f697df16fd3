"""How the lanes of a CP group compute attention together: the mechanisms that a bucket can choose from.

A bucket says which one it uses by a value, `types.Attention`. Everyone who wants to know what that means asks the
mechanism of that name. Read in this order:

    mechanism          what a mechanism answers: where it is possible, its price, its bytes, what the memory model needs
    ring, all_gather, all_to_all, two_levels    the four exchanges
    stage_attention    what their prices are made of: kernels and transfers of one pipeline stage
    heads              which heads a lane gets when heads are exchanged
    sent_bytes         bytes that a rank sends, which prices are made of and the runtime counts
    links              which link a group of lanes uses
    registry           all mechanisms by name; a new one is added there and to `types.CpCommType`
"""
