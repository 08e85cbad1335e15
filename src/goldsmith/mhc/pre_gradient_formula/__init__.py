"""mhc.pre_backward: the gradients of pre as one explicit formula, for those who write that kernel themselves."""
