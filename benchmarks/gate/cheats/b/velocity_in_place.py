"""Updates the velocity and the parameters where they lie, and returns the inputs themselves as new tensors."""

PROBLEM = "a_momentum"
STATUS = "cheating"
REASONS = {"input_changed", "aliased_output"}
ALSO = {"wrong"}


def candidate(p, g, velocity, lr, mu):
    velocity.data.mul_(mu).add_(g)
    p.data.sub_(lr * (g + mu * velocity))
    return p.view(-1), velocity.view(-1)
