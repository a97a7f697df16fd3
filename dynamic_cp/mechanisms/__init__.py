"""How the lanes of a CP group compute attention together: the mechanisms that a bucket can choose from.

Read in this order:
    attention_prices    seconds of every exchange
    sent_bytes          bytes that a rank sends, which prices are made of and the runtime counts
    heads               which heads a lane gets when heads are exchanged
    links               which link a group of lanes uses
"""
