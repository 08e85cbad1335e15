"""mhc.pre_backward: the gradients of pre as one explicit formula, a golden for people who write that kernel."""
