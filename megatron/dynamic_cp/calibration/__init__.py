"""`dynamic-cp profile`: measures this device with the modules that training uses and writes a hardware file.

    command.py   the options
    run.py       sections in turn, the progress bar, the files, the table
    device.py    which device, which ranks
    timing.py    seconds of a forward and a backward pass
    model.py     a small GPT as training builds it, and its parts
    sections.py  what is measured, section by section
    links.py     transfers between ranks

`undisturbed.py` tells what other programs take of a machine; the trainer's start_calibration.py asks it.
`dynamic_cp/calibration` fits what was measured.
"""
