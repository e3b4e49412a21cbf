"""Run by torchrun: the Trainer with the callback, and plain with DDP, compared to the bit."""

import copy
import pickle

import torch
from torch.nn.parallel import DistributedDataParallel
from trainers import assert_same_training, inner_optimizer, ours_of, train, trained, trainer

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

# Saved by the first rank alone, as the Trainer does, and resumed on all.
options |= {"save_strategy": "steps", "save_steps": 2, "save_only_model": False, "folder": "saved"}
first = trained(ours=True, **options)
again = trainer(ours=True, **options)
train(again, resume_from_checkpoint="saved/checkpoint-2")
for made in (first, again):
    ours_of(made).unwrap()
a, b = inner_optimizer(again), inner_optimizer(plain)
for p, q in zip(again.model.parameters(), plain.model.parameters(), strict=True):
    assert torch.equal(p, q)
    assert all(torch.equal(a.state[p][key], value) for key, value in b.state[q].items())
print("equal")
