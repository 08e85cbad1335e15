"""The primitives: functions of an operand, a result or a call, and of settings that hold for every length.

tensors        drop, scale, restrict, extend, transpose
formulas       a call by another formula: weights of addends, powers of factors, another function
repartitions   a reduction in blocks, over other axes, with another total
positions      other positions along an axis, other indices, other formats of integers
masks          shifted masks, masks by blocks, other values at masked places
spans          the rules for parts of an axis
windows        windows along an axis, and their taps
"""
