"""Right: a convolution with the powers of 0.9, by Fourier transforms in float64."""

import torch

PROBLEM = "a_ewma"
STATUS = "accepted"


def candidate(x):
    T = len(x)
    powers = 0.1 * 0.9 ** torch.arange(T, dtype=torch.float64)
    product = torch.fft.rfft(x.double(), 2 * T, dim=0) * torch.fft.rfft(powers, 2 * T)[:, None]
    return torch.fft.irfft(product, 2 * T, dim=0)[:T].to(x.dtype)
