"""PyTorch on one thread: the tensors of these tests are tiny, and other tests may run beside them."""

import torch

torch.set_num_threads(1)
