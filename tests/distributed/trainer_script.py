"""Run by torchrun: the Trainer with the callback, and plain with DDP, compared to the bit."""

import copy
import pickle

import torch
from torch.nn.parallel import DistributedDataParallel
from trainers import assert_same_training, ours_of, trained

torch.set_num_threads(1)
options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 4}
plain = trained(ours=False, **options)
assert isinstance(plain.model_wrapped, DistributedDataParallel)
ours = trained(ours=True, **options)
assert not isinstance(ours.model_wrapped, DistributedDataParallel)
assert ours.args.world_size == 2
with copy.deepcopy(ours.model).no_sync(), pickle.loads(pickle.dumps(ours.model)).no_sync():
    pass
ours_of(ours).unwrap()
assert_same_training(ours, plain)
print("equal")
