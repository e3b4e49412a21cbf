"""The main job as a demonstration: a GPT trained from scratch in too little device memory.

gpt.py is plain PyTorch, text.py makes batches, training.py is the user's loop and what is measured
around it. `autohete demo` and examples/train_gpt.py run it.
"""
