"""Products with quantised weights on Hopper, in Gluon, for up to some 512 rows of x.

The weight is the left side of each matrix instruction, whose 64 rows it fills; the rows of x are its columns, from 8 on. So a
product of one row wastes an eighth of the instruction's width and not 63 of 64 rows, and results come out transposed.

    schedule     how programs share the sum over K, and add their parts in a fixed order
    codes        FP8 and INT8: codes times codes
    gated_codes  FP8 gates and what they gate, written in FP8 with a scale that is known before
    widened      codes of 4 and 8 bits times 16 bits: weights become numbers in registers
    counters     counters of tiles that programs share
    launch       tiles by rows, descriptors, launches, refusals
"""
