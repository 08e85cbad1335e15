"""Edits of the golden as data: a selector, a primitive and a scope, with tables of those that kernels get wrong.

    selector   an operator of the graph, or an input, by name; and its part: the result, one operand, or the call
    primitive  a function from `primitives`, and its settings: numbers, axes, and rules that hold for every length
    scope      every reader of a tensor (its result), one reader (an operand), one line or turn (several operators),
               or the backward alone

An edit holds no tensor of a run, so it means the same on other inputs of the case. The tables in this folder and in
`gradients` give edits their causes, texts and priors.
"""
