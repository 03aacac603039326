"""One thread: on tiny tensors OpenMP's threads only wait for each other (300 times slower on a busy
machine). Tests of threads set their own number."""

import torch

torch.set_num_threads(1)
