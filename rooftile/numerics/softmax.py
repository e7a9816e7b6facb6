"""Numbers of softmax that all backends share: a copy that differed in one place would change bits.

Weights in FP8 are raised by 2 ** RAISED before they are rounded, so that small ones keep more of the format's range. A row's
reference score moves when a sum of its weights reaches TOO_LARGE: 432 and more round to 448, the largest number of e4m3.
"""

# exponentials are base 2: exp(x) = exp2(x * LOG2E), and log(x) = log2(x) * LN2
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

RAISED = 2.0
TOO_LARGE = 432.0
