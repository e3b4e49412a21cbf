"""Train a GPT from scratch, on real text, in a third of the device memory that it needs.

    python examples/train_gpt.py                       about two minutes on two cores
    python examples/train_gpt.py --check --steps 50    and compare with plain PyTorch
    python examples/train_gpt.py --device cuda         the same on a GPU
    torchrun --nproc-per-node 2 examples/train_gpt.py  two ranks, each with its share of the data

The same as `autohete demo`. To read it: autohete/demo/gpt.py is the model, plain PyTorch;
autohete/demo/training.py is the loop, which does not change when the model is wrapped; `prepare`
there holds the one line that autohete needs.
"""

from autohete.cli.demo import command

if __name__ == "__main__":
    command()
