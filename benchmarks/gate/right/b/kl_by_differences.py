"""Right: the log-sums are subtracted from the differences of the logits, after both rows lost their own maximum."""

PROBLEM = "a_kl"
STATUS = "accepted"


def candidate(teacher, student):
    t = teacher - teacher.detach().amax(-1, keepdim=True)
    s = student - student.detach().amax(-1, keepdim=True)
    e = t.exp()
    total = e.sum(-1)
    return (e * (t - s)).sum(-1) / total - total.log() + s.exp().sum(-1).log()
