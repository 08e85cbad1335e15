"""Changes of loops: the state between turns, operands of other turns, loops that run to the padded end."""
