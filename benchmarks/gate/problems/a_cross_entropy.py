"""loss[t] = logsumexp(logits[t]) - logits[t, label[t]]."""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], V=[50, 11])
def tokens(make, T, V):
    return {"logits": make.normal(T, V), "label": make.integers(0, V, T)}


cases = tokens


def golden(logits, label):
    shifted = logits - logits.amax(-1, keepdim=True)
    log_sum = torch.log(torch.exp(shifted).sum(-1))
    return log_sum - shifted.gather(1, label[:, None])[:, 0]
